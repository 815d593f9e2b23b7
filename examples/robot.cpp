// A control loop in C++ for a legged robot whose policy follows velocity commands, such as mjlab's Go1:
//
//   canter export go1 --to c
//   g++ -std=c++17 -O2 -Iruns/go1/exports examples/robot.cpp -o robot && ./robot 500
//
// `Robot` stands in for your driver. Its motors come in an order of their own: the header knows joints by name.
#include "best.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

struct Robot {
  std::vector<std::string> motors;
  std::vector<float> position, velocity, target;
  float linear[3] = {0, 0, 0}, angular[3] = {0, 0, 0}, gravity[3] = {0, 0, -1};

  void step() { // motors that move a fifth of the way to their target
    for (size_t m = 0; m < motors.size(); m++) {
      velocity[m] = 0.2f * (target[m] - position[m]) / POLICY_CONTROL_PERIOD;
      position[m] += 0.2f * (target[m] - position[m]);
    }
  }
};

int main(int argc, char **argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 500;
  static_assert(int(POLICY_ACTION_JOINT_POS_SIZE) == int(POLICY_JOINTS), "the policy moves every joint, in their order");
  static_assert(int(POLICY_OBS_ACTOR_JOINT_POS_SIZE) == int(POLICY_JOINTS), "this loop keeps no history");
  if (policy_selftest() != 0) {
    std::puts("this build does not return the policy's actions");
    return 1;
  }
  Robot robot;
  std::vector<int> joint_of; // joint of the policy for each motor
  for (int j = POLICY_JOINTS - 1; j >= 0; j--) { // your driver has its own list of names
    robot.motors.push_back(policy_joint_at(j)->name);
  }
  for (const std::string &motor : robot.motors) {
    for (int j = 0; j < POLICY_JOINTS; j++) {
      if (motor == policy_joint_at(j)->name) joint_of.push_back(j);
    }
  }
  if (joint_of.size() != POLICY_JOINTS) return 1;
  for (int j : joint_of) robot.position.push_back(policy_joint_at(j)->default_position);
  robot.velocity.assign(POLICY_JOINTS, 0.0f);
  robot.target = robot.position;

  float measured[POLICY_OBS_SIZE] = {0}, obs[POLICY_OBS_SIZE], command[POLICY_ACTION_SIZE];
  policy_action action[POLICY_ACTION_SIZE] = {0};
  const float velocity_command[3] = {0.5f, 0.0f, 0.0f}; // m/s, m/s, rad/s
  policy_reset();
  auto next = std::chrono::steady_clock::now();
  for (int step = 0; step < steps; step++) {
    std::memcpy(measured + POLICY_OBS_ACTOR_BASE_LIN_VEL, robot.linear, sizeof robot.linear);
    std::memcpy(measured + POLICY_OBS_ACTOR_BASE_ANG_VEL, robot.angular, sizeof robot.angular);
    std::memcpy(measured + POLICY_OBS_ACTOR_PROJECTED_GRAVITY, robot.gravity, sizeof robot.gravity);
    std::memcpy(measured + POLICY_OBS_ACTOR_COMMAND, velocity_command, sizeof velocity_command);
    std::memcpy(measured + POLICY_OBS_ACTOR_ACTIONS, action, sizeof action);
    for (int m = 0; m < POLICY_JOINTS; m++) {
      const int j = joint_of[m];
      measured[POLICY_OBS_ACTOR_JOINT_POS + j] = robot.position[m] - policy_joint_at(j)->default_position;
      measured[POLICY_OBS_ACTOR_JOINT_VEL + j] = robot.velocity[m];
    }
    policy_observe(measured, obs); // clipped and scaled as in the simulator
    if (policy_step(obs, action)) return 1; // NaN or infinity: stop the robot
    policy_command(action, command);
    for (float &a : action) a = policy_clamp(a, -POLICY_CLIP_ACTIONS, POLICY_CLIP_ACTIONS); // observed in the next step
    for (int m = 0; m < POLICY_JOINTS; m++) robot.target[m] = command[POLICY_ACTION_JOINT_POS + joint_of[m]];
    robot.step();
    next += std::chrono::microseconds(static_cast<int>(1e6 * POLICY_CONTROL_PERIOD));
    std::this_thread::sleep_until(next);
  }
  for (int m = 0; m < POLICY_JOINTS; m++) std::printf("%s %.6f\n", robot.motors[m].c_str(), robot.target[m]);
  return 0;
}
