/* The mathematics in float. */
#define REAL float
#define REAL_IS_DOUBLE 0
#include "real.h"

#include "gemm.h"
#include "layers.h"
#include "policy.h"

#include "memory.h"

#include "learn.h"
#include "update.h"

const Real REAL_FLOAT = {sizeof(REAL), prepare, act, values, log_prob, gradients, square_sum, adamw};
