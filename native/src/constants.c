/* The constants of a step, from an optimizer's hyper-parameters. */
#include <math.h>

#include "internal.h"

static struct zo_pair pair_of(double x) {
  const float high = (float)x;
  return (struct zo_pair){high, (float)(x - (double)high)};
}

/* base^exponent by squaring, in pairs of fp64. Not by pow, whose last bit differs between C
 * libraries and CPUs; not by running products, whose bits would depend on the history of resuming.
 */
static double power(double base, int64_t exponent) {
  double high = 1.0, low = 0.0, factor = base, factor_low = 0.0;
  for (; exponent > 0; exponent /= 2) {
    if (exponent % 2 != 0) {
      const double product = high * factor;
      low = fma(high, factor, -product) + (high * factor_low + low * factor);
      high = product;
    }
    const double square = factor * factor;
    factor_low = fma(factor, factor, -square) + 2.0 * factor * factor_low;
    factor = square;
  }
  return high + low;
}

/* Rounds what all rules use. */
static void round_constants(struct zo_constants *k) {
  k->f32.scale = pair_of(k->scale);
  k->f32.clip = (float)k->clip;
  k->f32.l2 = pair_of(k->l2);
  k->f32.minus_decay = (float)(k->decay - 1.0);
  k->f32.beta1 = pair_of(k->beta1);
  k->f32.first = pair_of(k->first);
  k->f32.beta2 = pair_of(k->beta2);
  k->f32.second = pair_of(k->second);
  k->f32.step_size = pair_of(k->step_size);
  k->f32.step_size_residue =
      k->f32.step_size.high == 0.0f ? 0.0f : k->f32.step_size.low / k->f32.step_size.high;
  /* A positive eps stays one whose inverse is finite. */
  k->f32.eps = (float)(k->eps > 0.0 ? fmax(k->eps, FLT_MIN) : 0.0);
}

static struct zo_constants begin(enum zo_rule rule, struct zo_gradient gradient) {
  return (struct zo_constants){
      .rule = rule,
      .scale = gradient.scale,
      .clip = (float)gradient.clip_value, /* in fp32, as torch clamps */
      .decay = 1.0,
  };
}

/* Whether the text for the usual hyper-parameters is as exact as the general one: see adam.inc.h.
 */
static int is_common(const struct zo_constants *k) {
  const double scale2 = k->scale * k->scale;
  return k->l2 == 0.0 && isinf(k->clip) && k->beta1 >= 0.875 && k->beta2 >= 0.875 &&
         scale2 >= 0x1p-80 && scale2 * k->second <= 1.0;
}

/* Makes the gradient's scale part of the constants. */
static void fold_scale(struct zo_constants *k) {
  k->rule = ZO_ADAM_COMMON;
  const double bias = k->f32.step_size_residue;
  const double first = k->first * k->scale;
  k->f32.first = pair_of(first);
  k->f32.first_rest = (float)(first * (1.0 + bias) - k->f32.first.high);
  k->f32.second = pair_of(k->second * k->scale * k->scale);
  k->f32.one_minus_beta1 = (float)k->first;
  k->f32.one_minus_beta1_exact = (float)(k->first - bias * k->beta1);
  k->f32.one_minus_beta2 = (float)k->second;
}

struct zo_constants zo_adam_constants(const struct zo_adam *hyper, int64_t step) {
  const double correction1 = 1.0 - power(hyper->beta1, step);
  const double correction2 = sqrt(1.0 - power(hyper->beta2, step));
  struct zo_constants k = begin(hyper->amsgrad ? ZO_AMSGRAD : ZO_ADAM, hyper->gradient);
  k.l2 = hyper->decoupled ? 0.0 : hyper->weight_decay;
  k.decay = hyper->decoupled ? 1.0 - hyper->lr * hyper->weight_decay : 1.0;
  k.beta1 = hyper->beta1;
  k.first = 1.0 - hyper->beta1;
  k.beta2 = hyper->beta2;
  k.second = 1.0 - hyper->beta2;
  k.step_size = hyper->lr * correction2 / correction1;
  k.eps = hyper->eps * correction2;
  round_constants(&k);
  if (!hyper->amsgrad && is_common(&k)) {
    fold_scale(&k);
  }
  return k;
}

struct zo_constants zo_sgd_constants(const struct zo_sgd *hyper, int64_t step) {
  struct zo_constants k = begin(hyper->momentum == 0.0 ? ZO_SGD : ZO_MOMENTUM, hyper->gradient);
  k.l2 = hyper->weight_decay;
  k.beta1 = step == 1 ? 0.0 : hyper->momentum;
  k.first = step == 1 ? 1.0 : 1.0 - hyper->dampening;
  k.second = hyper->momentum; /* of the look ahead */
  k.nesterov = hyper->nesterov;
  k.step_size = hyper->lr;
  round_constants(&k);
  return k;
}

struct zo_constants zo_adagrad_constants(const struct zo_adagrad *hyper, int64_t step) {
  struct zo_constants k = begin(ZO_ADAGRAD, hyper->gradient);
  k.l2 = hyper->weight_decay;
  k.step_size = hyper->lr / (1.0 + (double)(step - 1) * hyper->lr_decay);
  k.eps = hyper->eps;
  round_constants(&k);
  return k;
}

struct zo_constants zo_lion_constants(const struct zo_lion *hyper, int64_t step) {
  (void)step;
  struct zo_constants k = begin(ZO_LION, hyper->gradient);
  k.decay = 1.0 - hyper->lr * hyper->weight_decay;
  k.beta1 = hyper->beta1;
  k.first = 1.0 - hyper->beta1;
  k.beta2 = hyper->beta2;
  k.second = 1.0 - hyper->beta2;
  k.step_size = hyper->lr;
  round_constants(&k);
  return k;
}
