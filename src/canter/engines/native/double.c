/* The mathematics in double, for any processor; tests compare it with autograd to the last digits. */
#define REAL double
#define REAL_IS_DOUBLE 1
#include "mathematics.h"

const Real REAL_DOUBLE = REAL_TABLE;
