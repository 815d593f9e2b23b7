/* All of the mathematics, for the number type and the processor that the including file sets; that file names the table
 * of functions. */
#include "real.h"

#include "gemm.h"
#include "layers.h"
#include "recurrent.h"
#include "tower.h"
#include "policy.h"

#include "memory.h"

#include "act.h"
#include "learn.h"
#include "update.h"
#include "sac.h"

#define REAL_TABLE                                                                                                     \
    {sizeof(REAL), prepare, act, values, log_prob, gradients, square_sum, reverse_discounted_sum, column_sums, adamw,  \
     sac_gradients}
