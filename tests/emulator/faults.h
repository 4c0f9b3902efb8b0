// Faults of kernel text that would end the process - an address outside every buffer, an endless loop - and ones that
// x86 forgives but a GPU does not - a misaligned address - become text.
#ifndef JAXCG_TESTS_EMULATOR_FAULTS_H_
#define JAXCG_TESTS_EMULATOR_FAULTS_H_

#include <functional>
#include <string>

#include "scheduler.h"

namespace host {

// Runs `body` and returns "", or what went wrong. After a fault `body` is left where it was and never goes on.
std::string run_guarded(const Launch& launch, const std::function<void()>& body);

// Ends the launch from inside a kernel (scheduler.cc).
[[noreturn]] void stop_at_fault(const std::string& reason);

}  // namespace host

#endif  // JAXCG_TESTS_EMULATOR_FAULTS_H_
