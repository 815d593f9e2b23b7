/* A control loop in C: the pole on the cart, balanced by an exported policy.

     python examples/policy_to_c.py
     gcc -std=c99 -O2 -I. examples/policy.c -o cartpole -lm && ./cartpole

   On a robot, sensors and motors take the place of the physics below. */
#include <stdio.h>

#include "cartpole.h"

int main(void) {
  float obs[POLICY_OBS_SIZE] = {0.01f, 0.02f, 0.03f, -0.02f}; /* position, velocity, angle, rate of the angle */
  policy_action action[POLICY_ACTION_SIZE];
  int step;
  if (policy_selftest() != 0) {
    printf("this build does not return the policy's actions\n");
    return 1;
  }
  policy_reset();
  for (step = 0; step < 500; step++) {
    if (policy_step(obs, action)) return 1; /* NaN or infinity: stop the robot */
    const float force = action[0] == 1 ? 10.0f : -10.0f;
    const float c = cosf(obs[2]), s = sinf(obs[2]);
    const float push = (force + 0.05f * obs[3] * obs[3] * s) / 1.1f;
    const float spin = (9.8f * s - c * push) / (0.5f * (4.0f / 3.0f - 0.1f * c * c / 1.1f));
    const float acceleration = push - 0.05f * spin * c / 1.1f;
    obs[0] += 0.02f * obs[1];
    obs[1] += 0.02f * acceleration;
    obs[2] += 0.02f * obs[3];
    obs[3] += 0.02f * spin;
    if (fabsf(obs[0]) > 2.4f || fabsf(obs[2]) > 0.2095f) break;
  }
  printf("balanced for %d of 500 steps\n", step);
  return 0;
}
