// The kernels for AVX2 with FMA.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.h"
#include "target.h"

#define STOKER_ISA avx2
STOKER_TARGET_BEGIN("avx2,fma,f16c")
#include "vector_avx2.h"
#include "table.inc.h"
STOKER_TARGET_END
#endif
