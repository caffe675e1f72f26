/* The constants of a step, and the formula in fp64. */
#include <math.h>

#include "internal.h"

static struct zo_pair pair_of(double x) {
  const float high = (float)x;
  return (struct zo_pair){high, (float)(x - (double)high)};
}

struct zo_adam_constants zo_adam_constants(const struct zo_adam *hyper) {
  /* By pow, not by running products: the same constants after any history of resuming. */
  const double correction1 = 1.0 - pow(hyper->beta1, (double)hyper->step);
  const double correction2 = sqrt(1.0 - pow(hyper->beta2, (double)hyper->step));
  const double decay = hyper->lr * hyper->weight_decay;
  struct zo_adam_constants k = {
      .scale = hyper->grad_scale,
      .clip = (float)hyper->clip_value, /* in fp32, as torch clamps */
      .l2 = hyper->decoupled ? 0.0 : hyper->weight_decay,
      .decay = hyper->decoupled ? 1.0 - decay : 1.0,
      .beta1 = hyper->beta1,
      .one_minus_beta1 = 1.0 - hyper->beta1,
      .beta2 = hyper->beta2,
      .one_minus_beta2 = 1.0 - hyper->beta2,
      .step_size = hyper->lr * correction2 / correction1,
      .eps = hyper->eps * correction2,
  };

  const double scale2 = k.scale * k.scale;
  k.common = k.l2 == 0.0 && isinf(k.clip) && k.beta1 >= 0.875 && k.beta2 >= 0.875 &&
             scale2 >= 0x1p-80 && scale2 * k.one_minus_beta2 <= 1.0;
  const struct zo_pair step_size = pair_of(k.step_size);
  k.f32.step_size = step_size.high;
  k.f32.step_size_residue = step_size.high == 0.0f ? 0.0f : step_size.low / step_size.high;
  k.f32.minus_decay = (float)(k.decay - 1.0);
  /* A positive eps stays one whose inverse is finite. */
  k.f32.eps = (float)(k.eps > 0.0 ? fmax(k.eps, FLT_MIN) : 0.0);
  k.f32.beta1 = pair_of(k.beta1);
  k.f32.beta2 = pair_of(k.beta2);
  k.f32.clip = (float)k.clip;
  k.f32.scale = pair_of(k.scale);
  k.f32.l2 = pair_of(k.l2);
  const double first = k.one_minus_beta1 * (k.common ? k.scale : 1.0);
  k.f32.first = pair_of(first);
  k.f32.second = pair_of(k.one_minus_beta2 * (k.common ? scale2 : 1.0));

  const double bias = k.f32.step_size_residue;
  k.f32.one_minus_beta1 = (float)k.one_minus_beta1;
  k.f32.one_minus_beta1_exact = (float)(k.one_minus_beta1 - bias * k.beta1);
  k.f32.one_minus_beta2 = (float)k.one_minus_beta2;
  k.f32.first_rest = (float)(first * (1.0 + bias) - k.f32.first.high);
  return k;
}

/* One bit pattern for all NaNs: which operand's payload survives differs between compilers. */
static float rounded(double x) { return isnan(x) ? NAN : (float)x; }

void zo_adam_element(const struct zo_adam_constants *k, float gradient, float *master,
                     float *exp_avg, float *exp_avg_sq) {
  double a = gradient * k->scale;
  a = a > k->clip ? k->clip : a < -k->clip ? -k->clip : a; /* NaN passes */
  if (k->l2 != 0.0) {
    a += k->l2 * *master;
  }
  const double m = k->beta1 * *exp_avg + k->one_minus_beta1 * a;
  const double v = k->beta2 * *exp_avg_sq + k->one_minus_beta2 * a * a;
  const double p = k->decay * *master - k->step_size * (m / (sqrt(v) + k->eps));
  *master = rounded(p);
  *exp_avg = rounded(m);
  *exp_avg_sq = rounded(v);
}
