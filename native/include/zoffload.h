/* The native interface of lightning-zoffload.
 *
 * The C sources and cffi both read this file as it stands, so it holds declarations only: no
 * preprocessor directive, not even an include guard. C code includes it through src/internal.h. */

/* Element type of an exchange buffer. */
enum zo_dtype { ZO_F16, ZO_BF16, ZO_F32, ZO_DTYPE_COUNT };

enum zo_status {
  ZO_OK,
  ZO_NO_MEMORY,   /* a scratch allocation failed; nothing was computed */
  ZO_UNSUPPORTED, /* this build or this CPU lacks that instruction set */
};

/* Hyper-parameters of one Adam step, as torch.optim.Adam and AdamW name them. `step` counts from 1
 * and includes the step being made. The gradient is `exchange * grad_scale`, clamped to
 * [-clip_value, clip_value]. Weight decay is AdamW's if `decoupled`, else an L2 penalty. */
struct zo_adam {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double grad_scale;
  double clip_value;
  int64_t step;
  int decoupled;
};

/* One Adam step on n elements. `exchange` holds the gradient on entry and the new parameter,
 * rounded to nearest even, on return. The buffers must not overlap; any address of an element may
 * start them. All four results have the same bits on every instruction set and for any number of
 * threads. */
void zo_adam_step(const struct zo_adam *hyper, int64_t n, float *master, float *exp_avg,
                  float *exp_avg_sq, void *exchange, enum zo_dtype dtype, int threads);

/* Stores the sum of squares of n elements in *sum_sq: not finite exactly if an element is not,
 * since the square of an fp32 number fits fp64 with room for any sum of them. Same bits on every
 * instruction set and for any number of threads. Returns ZO_OK or ZO_NO_MEMORY. */
enum zo_status zo_grad_stats(int64_t n, const void *exchange, enum zo_dtype dtype, int threads,
                             double *sum_sq);

/* Instruction sets of this build are numbered from 0 (scalar, always there) upwards in order of
 * preference. The best one that the CPU and the operating system support is active at load. */
int zo_isa_count(void);
const char *zo_isa_name(int isa);
int zo_isa_supported(int isa);
int zo_isa_active(void);

/* Makes `isa` the active one for calls that start later. Returns ZO_OK or ZO_UNSUPPORTED. */
enum zo_status zo_isa_use(int isa);
