// A custom call's launches in a process of their own: how kernel text runs under a sanitizer, which Python cannot load.
#ifndef JAXCG_TESTS_EMULATOR_SUBPROCESS_H_
#define JAXCG_TESTS_EMULATOR_SUBPROCESS_H_

#include <string>
#include <vector>

#include "scheduler.h"

// Runs `program` (standalone.cc) on copies of the regions and, if it ends well, copies the contents back from region
// `first_result` on. Returns "" or what the program wrote to stderr.
std::string run_in_process(const std::string& program, const std::vector<host::Launch>& launches,
                           const std::vector<host::Region>& regions, size_t first_result,
                           const std::vector<long long>& sizes);

#endif  // JAXCG_TESTS_EMULATOR_SUBPROCESS_H_
