/* A control policy, written by Canter ${version}. Environment: ${env}
   Contract: ${contract}, sha256 ${sha256}

   policy_selftest();               call it first: 0 if this build returns the policy's actions
   policy_reset();                  at the start of an episode
   policy_step(obs, action);        once in a control period: obs[POLICY_OBS_SIZE] -> action[POLICY_ACTION_SIZE]

   policy_step returns 0, or 1 if an action is NaN or infinite: then stop the robot and call policy_reset.
   The normalisation of observations is inside policy_step. Scaling is not; if the environment declares it, there are
   policy_observe(measured, obs) and policy_command(action, command).
   All functions are static and use one shared memory. For several robots pass a policy_memory of each to
   policy_reset_of and policy_step_of. Compile with -O2 or -O3, without -ffast-math, and link with -lm. */
#ifndef POLICY_${guard}
#define POLICY_${guard}
#ifdef POLICY_OF_THIS_FILE
#error "a file can include one policy: compile each policy in a source file of its own"
#endif
#define POLICY_OF_THIS_FILE
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "NaN could not be detected: compile without -ffast-math, -ffinite-math-only and -Ofast"
#endif

#include <math.h>

${constants}
/* Layers of a policy in C99. Every output is a sum over the inputs in their order. */

static inline float policy_clamp(float x, float low, float high) { /* NaN stays NaN */
  return x < low ? low : x > high ? high : x;
}

static inline void policy_normalize(const float *x, int n, const float *shift, const float *inverse_scale, float clip,
                                    float *y) {
  int i;
  for (i = 0; i < n; i++) y[i] = policy_clamp((x[i] - shift[i]) * inverse_scale[i], -clip, clip);
}

static inline void policy_copy(const float *x, int n, float *y) {
  int i;
  for (i = 0; i < n; i++) y[i] = x[i];
}

/* w has the weights of POLICY_TILE outputs for the first input, for the second, and so on; then the next outputs. */
static inline void policy_linear(const float *x, int inputs, const float *w, const float *bias, int outputs, float *y) {
  int start, i, j;
  for (start = 0; start + POLICY_TILE <= outputs; start += POLICY_TILE) {
    float sum[POLICY_TILE];
    for (j = 0; j < POLICY_TILE; j++) sum[j] = bias[start + j];
    for (i = 0; i < inputs; i++, w += POLICY_TILE)
      for (j = 0; j < POLICY_TILE; j++) sum[j] += x[i] * w[j];
    for (j = 0; j < POLICY_TILE; j++) y[start + j] = sum[j];
  }
  if (start < outputs) {
    const int rest = outputs - start;
    for (j = 0; j < rest; j++) y[start + j] = bias[start + j];
    for (i = 0; i < inputs; i++, w += rest)
      for (j = 0; j < rest; j++) y[start + j] += x[i] * w[j];
  }
}

/* The same with weights of 8 bits: w * scale of the output. */
static inline void policy_linear_int8(const float *x, int inputs, const signed char *w, const float *scale,
                                      const float *bias, int outputs, float *y) {
  int start, i, j;
  for (start = 0; start < outputs; start += POLICY_TILE) {
    const int tile = outputs - start < POLICY_TILE ? outputs - start : POLICY_TILE;
    float sum[POLICY_TILE] = {0};
    if (tile == POLICY_TILE) {
      for (i = 0; i < inputs; i++, w += POLICY_TILE)
        for (j = 0; j < POLICY_TILE; j++) sum[j] += x[i] * (float)w[j];
    } else {
      for (i = 0; i < inputs; i++, w += tile)
        for (j = 0; j < tile; j++) sum[j] += x[i] * (float)w[j];
    }
    for (j = 0; j < tile; j++) y[start + j] = bias[start + j] + scale[start + j] * sum[j];
  }
}

static inline void policy_layer_norm(float *x, int n, const float *weight, const float *bias, float eps) {
  float mean = 0.0f, variance = 0.0f, inverse;
  int i;
  for (i = 0; i < n; i++) mean += x[i];
  mean /= (float)n;
  for (i = 0; i < n; i++) variance += (x[i] - mean) * (x[i] - mean);
  inverse = 1.0f / sqrtf(variance / (float)n + eps);
  for (i = 0; i < n; i++) x[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
}

static inline float policy_sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
static inline float policy_softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
static inline float policy_tanh(float x) { return tanhf(x); }
static inline float policy_relu(float x) { return x < 0.0f ? 0.0f : x; }
static inline float policy_elu(float x) { return x > 0.0f ? x : expm1f(x); }
static inline float policy_celu(float x) { return policy_elu(x); }
static inline float policy_silu(float x) { return x * policy_sigmoid(x); }
static inline float policy_gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
static inline float policy_leaky_relu(float x) { return x > 0.0f ? x : 0.01f * x; }
static inline float policy_mish(float x) { return x * tanhf(policy_softplus(x)); }
static inline float policy_selu(float x) {
  return 1.0507009873554805f * (x > 0.0f ? x : 1.6732632423543772f * expm1f(x));
}

/* own and recurrent are the two products of the gates, biases included: input, forget, cell, output. */
static inline void policy_lstm(const float *own, const float *recurrent, int n, float *hidden, float *cell) {
  int i;
  for (i = 0; i < n; i++) {
    const float into = policy_sigmoid(own[i] + recurrent[i]);
    const float forget = policy_sigmoid(own[n + i] + recurrent[n + i]);
    const float value = tanhf(own[2 * n + i] + recurrent[2 * n + i]);
    const float out = policy_sigmoid(own[3 * n + i] + recurrent[3 * n + i]);
    cell[i] = forget * cell[i] + into * value;
    hidden[i] = out * tanhf(cell[i]);
  }
}

/* Gates: reset, update, new. */
static inline void policy_gru(const float *own, const float *recurrent, int n, float *hidden) {
  int i;
  for (i = 0; i < n; i++) {
    const float reset = policy_sigmoid(own[i] + recurrent[i]);
    const float update = policy_sigmoid(own[n + i] + recurrent[n + i]);
    const float value = tanhf(own[2 * n + i] + reset * recurrent[2 * n + i]);
    hidden[i] = (1.0f - update) * value + update * hidden[i];
  }
}

/* Peaks of n beta distributions as -1..1, from 2 n raw parameters. */
static inline void policy_beta_mode(const float *x, int n, float *y) {
  int i;
  for (i = 0; i < n; i++) {
    const float a = policy_softplus(x[i]), b = policy_softplus(x[n + i]);
    const float mode = a + b > 0.0f ? a / (a + b) : a + b == 0.0f ? 0.5f : a + b;
    y[i] = 2.0f * policy_clamp(mode, 1e-6f, 1.0f - 1e-6f) - 1.0f;
  }
}

static inline int policy_differs(float x, float expected) { /* by more than 1e-5, relative above 1 */
  return !(fabsf(x - expected) <= 1e-5f * (fabsf(expected) > 1.0f ? fabsf(expected) : 1.0f));
}

static inline int policy_argmax(const float *x, int n) {
  int best = 0, i;
  for (i = 1; i < n; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

${layers}
static inline void policy_reset_of(policy_memory *m) {
  int i;
  for (i = 0; i < POLICY_STATE_SIZE; i++) m->state[i] = 0.0f;
}

static inline int policy_step_of(policy_memory *m, const float *obs, policy_action *action) {
  int i, bad = 0;
  ${body}
  return bad;
}

static policy_memory policy_shared;

static inline void policy_reset(void) { policy_reset_of(&policy_shared); }

static inline int policy_step(const float *obs, policy_action *action) {
  return policy_step_of(&policy_shared, obs, action);
}

${robot}
/* Return 0, or the number of the first test vector whose action differs; -1 without any. Resets the memory. */
static inline int policy_selftest(void) {
  static const float obs[] = {${observations}};
  static const policy_action expected[] = {${actions}};
  policy_action action[POLICY_ACTION_SIZE];
  int i, k, wrong = POLICY_TEST_VECTORS > 0 ? 0 : -1;
  policy_reset();
  for (k = 0; k < POLICY_TEST_VECTORS && !wrong; k++) {
    if (policy_step(obs + k * POLICY_OBS_SIZE, action)) wrong = k + 1;
    for (i = 0; i < POLICY_ACTION_SIZE; i++)
      if (policy_differs((float)action[i], (float)expected[k * POLICY_ACTION_SIZE + i])) wrong = k + 1;
  }
  policy_reset();
  return wrong;
}

#endif
