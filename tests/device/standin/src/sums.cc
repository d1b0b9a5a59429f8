#include "sums.h"

#include <algorithm>
#include <cstdint>

#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "settings.h"

namespace standin {
namespace {

template <typename Element, typename Operation>
void fold(const std::vector<const char*>& pieces, void* out, size_t count, Operation operation) {
  const auto* first = reinterpret_cast<const Element*>(pieces.front());
  std::vector<Element> folded(first, first + count);
  for (size_t piece = 1; piece < pieces.size(); ++piece) {
    const auto* next = reinterpret_cast<const Element*>(pieces[piece]);
    for (size_t i = 0; i < count; ++i) folded[i] = operation(folded[i], next[i]);
  }
  std::copy(folded.begin(), folded.end(), static_cast<Element*>(out));
}

// `Wide` is what one addition is carried out in.
template <typename Element, typename Wide = Element>
void reduce_as(const std::vector<const char*>& pieces, void* out, size_t count, C_CCLReduceOp op) {
  if (op == SUM) {
    fold<Element>(pieces, out, count, [](Element a, Element b) {
      return static_cast<Element>(static_cast<Wide>(a) + static_cast<Wide>(b));
    });
  } else if (op == MAX) {
    fold<Element>(pieces, out, count, [](Element a, Element b) { return a < b ? b : a; });
  } else {
    fold<Element>(pieces, out, count, [](Element a, Element b) { return b < a ? b : a; });
  }
}

}  // namespace

size_t element_bytes(C_DataType type) {
  switch (type) {
    case BOOL:
    case UINT8:
    case INT8:
      return 1;
    case INT16:
    case FLOAT16:
    case BFLOAT16:
      return 2;
    case INT32:
    case FLOAT32:
      return 4;
    case INT64:
    case FLOAT64:
      return 8;
    default:
      return 0;
  }
}

bool can_reduce(C_DataType type, C_CCLReduceOp op) {
  return (op == SUM || op == MAX || op == MIN) && element_bytes(type) > 0 && type != BOOL;
}

void reduce(const std::vector<const char*>& pieces, void* out, size_t count, C_DataType type, C_CCLReduceOp op) {
  switch (type) {
    case FLOAT32:
      return reduce_as<float>(pieces, out, count, op);
    case FLOAT16:
      return reduce_as<phi::dtype::float16, float>(pieces, out, count, op);
    case BFLOAT16:
      return reduce_as<phi::dtype::bfloat16, float>(pieces, out, count, op);
    case FLOAT64:
      return reduce_as<double>(pieces, out, count, op);
    case INT64:
      return reduce_as<int64_t>(pieces, out, count, op);
    case INT32:
      return reduce_as<int32_t>(pieces, out, count, op);
    case INT16:
      return reduce_as<int16_t>(pieces, out, count, op);
    case INT8:
      return reduce_as<int8_t>(pieces, out, count, op);
    case UINT8:
      return reduce_as<uint8_t>(pieces, out, count, op);
    default:
      give_up("a reduction of an unknown type");
  }
}

}  // namespace standin
