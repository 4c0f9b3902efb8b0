// A program that runs launches of kernel text under a sanitizer: `program REQUEST`, where each line of REQUEST is
//   order ORDER SEED SECONDS   |   buffer BYTES FILE   |   size INTEGER   |   launch KERNEL THREADS SHARED_BYTES BLOCKS
// Buffers are read, and written back after the last launch. Exits with 3 and the reason on stderr if a launch fails.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "scheduler.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::vector<host::Launch> launches;
  std::vector<std::string> names, files;
  std::vector<host::Region> regions;
  std::vector<long long> sizes;
  int order = 0, seconds = 0;
  unsigned seed = 0;
  std::ifstream request(argv[1]);
  for (std::string line, word; std::getline(request, line);) {
    std::istringstream words(line);
    words >> word;
    if (word == "order") {
      words >> order >> seed >> seconds;
    } else if (word == "size") {
      words >> sizes.emplace_back();
    } else if (word == "buffer") {
      long long bytes = 0;
      words >> bytes >> std::ws;
      std::getline(words, files.emplace_back());
      // Exactly as large as asked, so that the next byte is out of bounds.
      void* memory = malloc(static_cast<size_t>(bytes));
      std::ifstream(files.back(), std::ios::binary).read(static_cast<char*>(memory), bytes);
      regions.push_back({memory, bytes});
    } else if (word == "launch") {
      host::Launch& launch = launches.emplace_back();
      words >> names.emplace_back() >> launch.threads >> launch.shared_bytes >> launch.blocks;
    }
  }
  std::vector<char> arguments;
  auto append = [&arguments](const void* value) {
    arguments.insert(arguments.end(), static_cast<const char*>(value), static_cast<const char*>(value) + 8);
  };
  for (const host::Region& region : regions) append(&region.begin);
  for (const long long& size : sizes) append(&size);
  alarm(static_cast<unsigned>(seconds));  // An endless loop.
  char error[4096] = "";
  for (size_t index = 0; index < launches.size(); ++index) {
    host::Launch& launch = launches[index];
    launch.kernel = names[index].c_str();
    launch.arguments = arguments.data();
    launch.argument_bytes = static_cast<long long>(arguments.size());
    launch.order = order;
    launch.seed = seed;
    launch.seconds = seconds;
    launch.regions = regions.data();
    launch.num_regions = static_cast<int>(regions.size());
    launch.error = error;
    launch.error_bytes = sizeof error;
    if (jaxcg_host_launch(&launch) != 0) {
      fprintf(stderr, "%s\n", error);
      return 3;
    }
  }
  for (size_t index = 0; index < regions.size(); ++index) {
    std::ofstream(files[index], std::ios::binary)
        .write(static_cast<const char*>(regions[index].begin), regions[index].bytes);
  }
  return 0;
}
