/* The formulas in fp64, for the elements where the fp32 kernels meet infinities. */
#include <math.h>

#include "internal.h"

/* One bit pattern for all NaNs: which operand's payload survives differs between compilers. */
static float rounded(double x) { return isnan(x) ? NAN : (float)x; }

static double gradient_of(const struct zo_constants *k, double raw, double p) {
  double a = raw * k->scale;
  a = a > k->clip ? k->clip : a < -k->clip ? -k->clip : a; /* NaN passes */
  return k->l2 == 0.0 ? a : a + k->l2 * p;
}

static double by_root(const struct zo_constants *k, double numerator, double v) {
  return k->step_size * (numerator / (sqrt(v) + k->eps));
}

static double adam(const struct zo_constants *k, double a, double p, double s[3]) {
  s[0] = k->beta1 * s[0] + k->first * a;
  s[1] = k->beta2 * s[1] + k->second * a * a;
  double v = s[1];
  if (k->rule == ZO_AMSGRAD) {
    v = s[2] = s[2] > v ? s[2] : v;
  }
  return k->decay * p - by_root(k, s[0], v);
}

static double sgd(const struct zo_constants *k, double a, double p, double s[3]) {
  if (k->rule == ZO_MOMENTUM) {
    s[0] = k->beta1 * s[0] + k->first * a;
    a = k->nesterov ? a + k->second * s[0] : s[0];
  }
  return p - k->step_size * a;
}

static double adagrad(const struct zo_constants *k, double a, double p, double s[3]) {
  s[0] += a * a;
  return p - by_root(k, a, s[0]);
}

static double lion(const struct zo_constants *k, double a, double p, double s[3]) {
  const double c = k->beta1 * s[0] + k->first * a;
  s[0] = k->beta2 * s[0] + k->second * a;
  return k->decay * p - k->step_size * ((c > 0.0) - (c < 0.0));
}

void zo_update_element(const struct zo_constants *k, float gradient, float *master,
                       float state[3]) {
  double p = *master;
  double s[3] = {state[0], state[1], state[2]};
  const double a = gradient_of(k, gradient, p);
  switch (k->rule) {
  case ZO_SGD:
  case ZO_MOMENTUM:
    p = sgd(k, a, p, s);
    break;
  case ZO_ADAGRAD:
    p = adagrad(k, a, p, s);
    break;
  case ZO_LION:
    p = lion(k, a, p, s);
    break;
  default:
    p = adam(k, a, p, s);
  }
  *master = rounded(p);
  for (int j = 0; j < 3; j++) {
    state[j] = rounded(s[j]);
  }
}
