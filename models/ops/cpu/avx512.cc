// The kernels for AVX-512 with VNNI.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.h"
#include "target.h"

#define STOKER_ISA avx512
STOKER_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#include "vector_avx512.h"
#include "table.inc.h"
STOKER_TARGET_END
#endif
