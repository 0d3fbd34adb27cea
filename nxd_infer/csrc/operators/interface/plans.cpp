#include "interface/plans.h"
#include "interface/registration.h"

#include <exception>
#include <map>
#include <string>

namespace nxd {
namespace {

std::map<std::string, Planner>& planners() {
  static auto* all = new std::map<std::string, Planner>;  // outlives every thread
  return *all;
}

const PlannedFunctions functions = {
    [](const char* op, const PlannedArgument* arguments) -> void* {
      const auto found = planners().find(op);
      if (found == planners().end()) return nullptr;
      try {
        return found->second(arguments).release();
      } catch (const std::exception&) {
        return nullptr;
      }
    },
    [](void* plan, char* const* data) { static_cast<Planned*>(plan)->point(data); },
    [](void* plan) { static_cast<Planned*>(plan)->run(); },
    [](void* plan) { delete static_cast<Planned*>(plan); },
};

int64_t planned_functions(int64_t version) {
  return version == kPlannedVersion ? reinterpret_cast<int64_t>(&functions) : 0;
}

} // namespace

bool register_planner(const char* op, Planner planner) { return planners().emplace(op, planner).second; }

} // namespace nxd

NXD_LIBRARY(m) { m.def("planned_functions(int version) -> int"); }

NXD_IMPL(CompositeExplicitAutograd, m) { m.impl("planned_functions", TORCH_BOX(&nxd::planned_functions)); }
