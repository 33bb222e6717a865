// The kernels in plain C++, for any processor.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.h"
#include "target.h"

#define STOKER_ISA portable
#include "vector_portable.h"
#include "table.inc.h"
