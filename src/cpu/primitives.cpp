#include "cpu/primitives.h"

namespace ingot::cpu {

namespace baseline {
template <class T>
const Primitives<T>& table();
}
#if defined(__x86_64__)
namespace avx2 {
template <class T>
const Primitives<T>& table();
}
namespace avx512 {
template <class T>
const Primitives<T>& table();
}
#endif

template <class T>
const Primitives<T>& primitives(Level level) {
#if defined(__x86_64__)
  if (level == Level::avx512) return avx512::table<T>();
  if (level == Level::avx2) return avx2::table<T>();
#endif
  (void)level;
  return baseline::table<T>();
}
template const Primitives<float>& primitives<float>(Level);
template const Primitives<double>& primitives<double>(Level);

}  // namespace ingot::cpu
