/* The mathematics in float, for any processor. */
#define REAL float
#define REAL_IS_DOUBLE 0
#define DEFINES_NAMES
#include "mathematics.h"

const Real REAL_FLOAT = REAL_TABLE;
