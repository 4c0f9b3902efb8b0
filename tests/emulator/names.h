// Words for what threads wait for.
#ifndef JAXCG_TESTS_EMULATOR_NAMES_H_
#define JAXCG_TESTS_EMULATOR_NAMES_H_

#include <stdio.h>

#include <string>

#include "scheduler.h"

namespace host {

inline const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::barrier:
      return "__syncthreads";
    case Operation::warp_barrier:
      return "__syncwarp";
    case Operation::shuffle:
      return "__shfl_sync";
    case Operation::shuffle_xor:
      return "__shfl_xor_sync";
    case Operation::shuffle_up:
      return "__shfl_up_sync";
    case Operation::shuffle_down:
      return "__shfl_down_sync";
    case Operation::ballot:
      return "vote";
  }
  return "?";
}

inline std::string place_of(Operation operation, int line, unsigned mask) {
  char text[96];
  if (operation == Operation::barrier) {
    snprintf(text, sizeof text, "__syncthreads() on line %d", line);
  } else {
    snprintf(text, sizeof text, "%s(mask 0x%08x) on line %d", name_of(operation), mask, line);
  }
  return text;
}

inline std::string lanes_of(unsigned mask) {
  std::string text;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    int last = lane;
    while (last + 1 < 32 && mask >> (last + 1) & 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(lane) + (last > lane ? "-" + std::to_string(last) : "");
    lane = last;
  }
  return text;
}

}  // namespace host

#endif  // JAXCG_TESTS_EMULATOR_NAMES_H_
