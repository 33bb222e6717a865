// Lets one file of a plain x86-64 build use a newer instruction set. Standard headers must come
// before STOKER_TARGET_BEGIN, or their inline functions would need the new instructions too.
#pragma once

#define STOKER_INLINE static inline __attribute__((always_inline))
#define STOKER_PRAGMA(text) _Pragma(#text)
// Unrolled early, a loop over an array of vectors leaves them in registers.
#if defined(__clang__)
#define STOKER_UNROLL STOKER_PRAGMA(unroll)
#else
#define STOKER_UNROLL STOKER_PRAGMA(GCC unroll 16)
#endif

#if defined(__clang__)
#define STOKER_TARGET_BEGIN(isa) \
  STOKER_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define STOKER_TARGET_END STOKER_PRAGMA(clang attribute pop)
#else
#define STOKER_TARGET_BEGIN(isa) STOKER_PRAGMA(GCC push_options) STOKER_PRAGMA(GCC target(isa))
#define STOKER_TARGET_END STOKER_PRAGMA(GCC pop_options)
#endif
