// Ways into functions that do something else first, whatever the functions' arguments are.
#pragma once

#include <cstddef>

namespace standin {

// Room for the entries of `count` functions; never given back.
class Entries {
 public:
  explicit Entries(size_t count);

  // A function with the arguments of `function`: hands the first of them, a pointer, and `function` to
  // standin_before_kernel(), and goes on with all of them in what that returns. Ends the process if there is no room.
  void* into(void* function);

  // After the last into(), before the first call.
  void close();

 private:
  const size_t bytes_;
  unsigned char* const begin_;
  unsigned char* next_;
};

}  // namespace standin

// What every entry calls. Returns where to go on.
extern "C" __attribute__((visibility("hidden"))) void* standin_before_kernel(const void* first, void* function) noexcept;
