#include <string>
#include <vector>

#include "cc/server/run_server.h"

int main(int argc, char** argv) {
  return tfswitch::RunServer(std::vector<std::string>(argv + 1, argv + argc));
}
