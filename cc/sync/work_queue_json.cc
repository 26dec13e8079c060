#include "cc/sync/work_queue_json.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/json.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// Returns false where nlohmann's accessors would throw.
template <typename T>
bool Get(const Json& json, const char* field, bool (Json::*is_right)() const,
         T* value) {
  const auto it = json.find(field);
  if (it == json.end() || !((*it).*is_right)()) return false;
  *value = it->get<T>();
  return true;
}
bool Get(const Json& json, const char* field, int64_t* value) {
  return Get(json, field, &Json::is_number_integer, value);
}
bool Get(const Json& json, const char* field, std::string* value) {
  return Get(json, field, &Json::is_string, value);
}

bool GetOptions(const Json& json, WorkQueueOptions* options) {
  if (!json.is_object()) return false;
  const auto items = json.find("items");
  if (!Get(json, "epochs", &options->num_epochs) || items == json.end() ||
      !items->is_array() ||
      !Get(json, "shuffle", &Json::is_boolean, &options->shuffles) ||
      !Get(json, "seed", &Json::is_number_unsigned, &options->seed)) {
    return false;
  }
  for (const Json& item : *items) {
    if (!item.is_string()) return false;
    options->items.push_back(item.get<std::string>());
  }
  return true;
}

bool GetSaved(const Json& json, SavedWorkQueue* saved) {
  if (!GetOptions(json, &saved->options) ||
      !Get(json, "group", &saved->group) || !Get(json, "name", &saved->queue) ||
      !Get(json, "epoch", &saved->state.epoch) ||
      !Get(json, "num_taken", &saved->state.num_taken)) {
    return false;
  }
  const auto unfinished = json.find("unfinished");
  if (unfinished == json.end() || !unfinished->is_array()) return false;
  for (const Json& entry : *unfinished) {
    int64_t index = 0;
    int64_t offset = 0;
    if (!entry.is_object() || !Get(entry, "item", &index) ||
        !Get(entry, "offset", &offset)) {
      return false;
    }
    saved->state.unfinished[index] = offset;
  }
  return true;
}

}  // namespace

std::string SavedWorkQueuesToJson(const std::vector<SavedWorkQueue>& saved) {
  Json list = Json::array();
  for (const SavedWorkQueue& each : saved) {
    Json unfinished = Json::array();
    for (const auto& [index, offset] : each.state.unfinished) {
      unfinished.push_back({{"item", index}, {"offset", offset}});
    }
    list.push_back({{"group", each.group},
                    {"name", each.queue},
                    {"items", each.options.items},
                    {"epochs", each.options.num_epochs},
                    {"shuffle", each.options.shuffles},
                    {"seed", each.options.seed},
                    {"epoch", each.state.epoch},
                    {"num_taken", each.state.num_taken},
                    {"unfinished", std::move(unfinished)}});
  }
  return DumpJson(list);
}

absl::StatusOr<std::vector<SavedWorkQueue>> SavedWorkQueuesFromJson(
    const std::string& json) {
  std::vector<SavedWorkQueue> list;
  if (json.empty()) return list;
  const absl::StatusOr<Json> parsed = ParseJson(json);
  bool is_good = parsed.ok() && parsed->is_array();
  for (size_t i = 0; is_good && i < parsed->size(); ++i) {
    is_good = GetSaved((*parsed)[i], &list.emplace_back());
  }
  if (is_good) return list;
  return absl::DataLossError("the saved work queues are damaged");
}

}  // namespace tfswitch
