/* The mathematics in double. */
#define REAL double
#define REAL_IS_DOUBLE 1
#include "real.h"

#include "gemm.h"
#include "layers.h"
#include "policy.h"

#include "memory.h"

#include "learn.h"
#include "update.h"

const Real REAL_DOUBLE = {sizeof(REAL), prepare, act, values, log_prob, gradients, square_sum, adamw};
