/* The table of one instruction set. A file of isa/ includes it after a vocabulary, and nothing
 * else.
 */
#pragma once

#include "passes.inc.h"
#include "update.inc.h"

#define ZO_KERNELS(isa)                                                                            \
  {                                                                                                \
      .name = isa,                                                                                 \
      .update =                                                                                    \
          {                                                                                        \
              [ZO_ADAM_COMMON] = UPDATE_TABLE(adam_common),                                        \
              [ZO_ADAM] = UPDATE_TABLE(adam),                                                      \
              [ZO_AMSGRAD] = UPDATE_TABLE(amsgrad),                                                \
              [ZO_SGD] = UPDATE_TABLE(sgd),                                                        \
              [ZO_MOMENTUM] = UPDATE_TABLE(momentum),                                              \
              [ZO_ADAGRAD] = UPDATE_TABLE(adagrad),                                                \
              [ZO_LION] = UPDATE_TABLE(lion),                                                      \
          },                                                                                       \
      .sum_of_squares = PASS_TABLE(sum_of_squares),                                                \
      .accumulate = PASS_TABLE(accumulate),                                                        \
      .widen = PASS_TABLE(widen),                                                                  \
      .narrow = PASS_TABLE(narrow),                                                                \
  }
