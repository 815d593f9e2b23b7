/* The mathematics in double, for any processor; tests hold it against autograd to the last digits. */
#define REAL double
#define REAL_IS_DOUBLE 1
#include "mathematics.h"

const Real REAL_DOUBLE = REAL_TABLE;
