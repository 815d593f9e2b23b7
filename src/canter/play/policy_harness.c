/* Functions of a policy's header as a library, for the comparison with the policy and the measurement of a step. */
#define _POSIX_C_SOURCE 199309L
#include "policy.h"
#include <time.h>

int selftest(void);
void run(int count, const float *obs, const float *state, policy_action *action, float *next);
void measure(int count, const float *obs, policy_action *action, double *seconds);

int selftest(void) { return policy_selftest(); }

void run(int count, const float *obs, const float *state, policy_action *action, float *next) {
  static policy_memory memory;
  int k, i;
  for (k = 0; k < count; k++) {
    for (i = 0; i < POLICY_STATE_SIZE; i++) memory.state[i] = state[k * POLICY_STATE_SIZE + i];
    policy_step_of(&memory, obs + k * POLICY_OBS_SIZE, action + k * POLICY_ACTION_SIZE);
    for (i = 0; i < POLICY_STATE_SIZE; i++) next[k * POLICY_STATE_SIZE + i] = memory.state[i];
  }
}

void measure(int count, const float *obs, policy_action *action, double *seconds) {
  struct timespec start, end;
  int k;
  for (k = 0; k < count; k++) {
    clock_gettime(CLOCK_MONOTONIC, &start);
    policy_step(obs + k * POLICY_OBS_SIZE, action);
    clock_gettime(CLOCK_MONOTONIC, &end);
    seconds[k] = (double)(end.tv_sec - start.tv_sec) + 1e-9 * (double)(end.tv_nsec - start.tv_nsec);
  }
}
