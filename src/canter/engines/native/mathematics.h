/* All of the mathematics, for one kind of number and one kind of processor: what includes this says which, and gives it a
 * name as a table of functions. */
#include "real.h"

#include "gemm.h"
#include "layers.h"
#include "policy.h"

#include "memory.h"

#include "learn.h"
#include "update.h"
#include "sac.h"

#define REAL_TABLE                                                                                                     \
    {sizeof(REAL), prepare, act, values, log_prob, gradients, square_sum, trace_back, column_sums, adamw,  \
     sac_gradients}
