/* The native interface of lightning-zoffload.
 *
 * The C sources and cffi both read this file as it stands, so it holds declarations only: no
 * preprocessor directive, not even an include guard. C code includes it through src/internal.h.
 *
 * Every result has the same bits on every instruction set and for any number of threads. */

/* Element type of a buffer. */
enum zo_dtype { ZO_F16, ZO_BF16, ZO_F32, ZO_DTYPE_COUNT };

enum zo_status {
  ZO_OK,
  ZO_NO_MEMORY,   /* a scratch allocation failed; nothing was computed */
  ZO_UNSUPPORTED, /* this build or this CPU lacks that instruction set */
};

/* The buffers of an update, of n elements each. They must not overlap; any address of an element
 * may start them. `exchange` holds the gradient on entry and the new parameter, rounded to nearest
 * even, on return. `state` is what the optimizer keeps, in the order that its update names it:
 * fp32, or bf16, which is then rounded stochastically (see zo_segments). */
struct zo_buffers {
  int64_t n;
  float *master;
  void *state[3];
  void *exchange;
  enum zo_dtype exchange_dtype;
  enum zo_dtype state_dtype;
};

/* Segments of the buffers: number i goes from the end of number i - 1 (the first from `begin`,
 * which is negative where the buffers start in its middle, else 0) to ends[i], exclusive. steps[i]
 * counts from 1 and includes the step being made; where it is 0 the segment is left as it is.
 * Elements behind the last end are too.
 *
 * A bf16 state is rounded up with the probability that makes its mean exact. The random number is a
 * function of seeds[i], steps[i] and the element's number in its segment (mod 2^32), of nothing
 * else. */
struct zo_segments {
  int64_t count;
  int64_t begin;
  const int64_t *ends;
  const int64_t *steps;
  const int64_t *seeds;
};

/* What all updates do to the gradient first: times `scale`, clamped to [-clip_value, clip_value].
 */
struct zo_gradient {
  double scale;
  double clip_value;
};

/* torch.optim.Adam, and AdamW if `decoupled`. State: exp_avg, exp_avg_sq, and max_exp_avg_sq if
 * `amsgrad`. */
struct zo_adam {
  struct zo_gradient gradient;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  int decoupled;
  int amsgrad;
};

/* torch.optim.SGD. State: momentum_buffer, if momentum is not 0. Step 1 fills it with the gradient,
 * as torch does where there is none yet. */
struct zo_sgd {
  struct zo_gradient gradient;
  double lr;
  double momentum;
  double dampening;
  double weight_decay;
  int nesterov;
};

/* torch.optim.Adagrad. State: sum. */
struct zo_adagrad {
  struct zo_gradient gradient;
  double lr;
  double lr_decay;
  double eps;
  double weight_decay;
};

/* Lion (arXiv 2302.06675, program 1). State: exp_avg. */
struct zo_lion {
  struct zo_gradient gradient;
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
};

void zo_adam_step(const struct zo_adam *hyper, const struct zo_buffers *buffers,
                  const struct zo_segments *segments, int threads);
void zo_sgd_step(const struct zo_sgd *hyper, const struct zo_buffers *buffers,
                 const struct zo_segments *segments, int threads);
void zo_adagrad_step(const struct zo_adagrad *hyper, const struct zo_buffers *buffers,
                     const struct zo_segments *segments, int threads);
void zo_lion_step(const struct zo_lion *hyper, const struct zo_buffers *buffers,
                  const struct zo_segments *segments, int threads);

/* Stores the sum of squares of n elements in *sum_sq: not finite exactly if an element is not,
 * since the square of an fp32 number fits fp64 with room for any sum of them. */
enum zo_status zo_grad_stats(int64_t n, const void *exchange, enum zo_dtype dtype, int threads,
                             double *sum_sq);

/* accumulator += gradient, and the statistics of the sum as zo_grad_stats makes them. */
enum zo_status zo_accumulate(int64_t n, float *accumulator, const void *gradient,
                             enum zo_dtype dtype, int threads, double *sum_sq);

/* destination = source, rounded to nearest even. One of the two dtypes is fp32. */
void zo_cast(int64_t n, const void *source, enum zo_dtype source_dtype, void *destination,
             enum zo_dtype destination_dtype, int threads);

/* Copies bytes between buffers that do not overlap. */
void zo_copy(int64_t bytes, const void *source, void *destination, int threads);

/* Writes a zero to every page of a fresh mapping, so that the system provides them now, by the
 * threads that will use them. */
void zo_first_touch(int64_t bytes, void *memory, int threads);

/* Instruction sets of this build are numbered from 0 (scalar, always there) upwards in order of
 * preference. The best one that the CPU and the operating system support is active at load. */
int zo_isa_count(void);
const char *zo_isa_name(int isa);
int zo_isa_supported(int isa);
int zo_isa_active(void);

/* Makes `isa` the active one for calls that start later. Returns ZO_OK or ZO_UNSUPPORTED. */
enum zo_status zo_isa_use(int isa);
