// Attention over bfloat16 pages for AVX-512 with BF16.
#if defined(__x86_64__)
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.h"
#include "target.h"

#define STOKER_ISA avx512_bf16
STOKER_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#include "vector_avx512.h"
#include "math.inc.h"
#include "dense.inc.h"
#include "blocks.inc.h"
#include "attend.inc.h"
#include "pairs.inc.h"
STOKER_TARGET_END
#endif
