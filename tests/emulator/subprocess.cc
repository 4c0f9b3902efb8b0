#include "subprocess.h"

#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

bool write_file(const std::string& path, const void* data, size_t bytes) {
  FILE* file = fopen(path.c_str(), "wb");
  if (file == nullptr) return false;
  const bool good = bytes == 0 || fwrite(data, 1, bytes, file) == bytes;
  return fclose(file) == 0 && good;
}

bool read_file(const std::string& path, void* data, size_t bytes) {
  FILE* file = fopen(path.c_str(), "rb");
  if (file == nullptr) return false;
  const bool good = bytes == 0 || fread(data, 1, bytes, file) == bytes;
  fclose(file);
  return good;
}

std::string read_text(const std::string& path) {
  std::string text(1 << 14, '\0');
  FILE* file = fopen(path.c_str(), "rb");
  text.resize(file == nullptr ? 0 : fread(text.data(), 1, text.size(), file));
  if (file != nullptr) fclose(file);
  return text;
}

// Exit status, or -1.
int run_program(const std::string& program, const std::string& request, const std::string& messages) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, messages.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  std::string asan = "ASAN_OPTIONS=detect_leaks=0", tsan = "TSAN_OPTIONS=exitcode=66";
  std::string name = program, argument = request;
  char* arguments[] = {name.data(), argument.data(), nullptr};
  char* environment[] = {asan.data(), tsan.data(), nullptr};
  pid_t child = 0;
  int status = 0;
  const bool started = posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environment) == 0;
  posix_spawn_file_actions_destroy(&actions);
  if (!started || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

std::string run_in_process(const std::string& program, const std::vector<host::Launch>& launches,
                           const std::vector<host::Region>& regions, size_t first_result,
                           const std::vector<long long>& sizes) {
  const char* parent = getenv("TMPDIR");
  std::string directory = std::string(parent == nullptr ? "/tmp" : parent) + "/jaxcg-call-XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) return "cannot make a directory for the process's files";
  std::vector<std::string> files;
  std::string request;
  bool good = true;
  for (const host::Region& region : regions) {
    files.push_back(directory + "/buffer" + std::to_string(files.size()));
    request += "buffer " + std::to_string(region.bytes) + " " + files.back() + "\n";
    good = good && write_file(files.back(), region.begin, static_cast<size_t>(region.bytes));
  }
  for (long long size : sizes) request += "size " + std::to_string(size) + "\n";
  for (const host::Launch& launch : launches) {
    request += "order " + std::to_string(launch.order) + " " + std::to_string(launch.seed) + " " +
               std::to_string(launch.seconds) + "\nlaunch " + launch.kernel + " " + std::to_string(launch.threads) +
               " " + std::to_string(launch.shared_bytes) + " " + std::to_string(launch.blocks) + "\n";
  }
  files.push_back(directory + "/request");
  good = good && write_file(files.back(), request.data(), request.size());
  files.push_back(directory + "/messages");
  std::string fault = "cannot write the process's files";
  if (good) {
    const int status = run_program(program, directory + "/request", files.back());
    fault = status == 0 ? "" : "exit status " + std::to_string(status) + ": " + read_text(files.back());
    for (size_t index = first_result; index < regions.size() && fault.empty(); ++index) {
      void* result = const_cast<void*>(regions[index].begin);
      if (!read_file(files[index], result, static_cast<size_t>(regions[index].bytes))) fault = "no result was written";
    }
  }
  for (const std::string& file : files) unlink(file.c_str());
  rmdir(directory.c_str());
  return fault;
}
