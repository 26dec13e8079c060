// tfswitch-serving: a prediction server for the clients of TensorFlow Serving.
//
//   tfswitch-serving --model_dir=/models/ranking --model_name=ranking
//
// The server has two halves, because TensorFlow and the distribution's gRPC
// must not share a namespace of symbols. This half contains TensorFlow and the
// model. It opens the other half, libtfswitch_serving_rpc.so, which contains
// gRPC and is in the folder of the program. Requests and answers pass between
// them as the C types of serving_rpc.h. The server listens before it loads the
// model, so that the health service answers meanwhile.

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "cc/base/log_writer.h"
#include "cc/base/steady_clock.h"
#include "cc/predictor/errors.h"
#include "cc/predictor/program_flags.h"
#include "cc/predictor/serving_rpc.h"
#include "cc/rpc/security_flags.h"
#include "tfswitch/predictor.h"

namespace tfswitch {
namespace {

constexpr int kCannotServe = 1;
constexpr int kBadFlag = 2;
// Seconds, after the grace.
constexpr double kTimeToClose = 1;
// More would overflow the clock.
constexpr double kMaxGrace = 24 * 3600;

ServingBytes BytesOf(std::string_view text) {
  return {text.data(), text.size()};
}

std::string StringOf(ServingBytes bytes) {
  return std::string(bytes.data, bytes.size);
}

void SetError(const Status& status, const ServingAnswer* answer) {
  answer->set_error(answer->answer, static_cast<int32_t>(status.code()),
                    BytesOf(status.message()));
}

Result<Tensor> ToTensor(const ServingTensor& from) {
  Result<Tensor> tensor =
      Tensor::Make(static_cast<DataType>(from.dtype),
                   std::vector<int64_t>(from.dims, from.dims + from.num_dims));
  if (!tensor.ok()) {
    return WithContext(tensor.status(), "input '", StringOf(from.name), "': ");
  }
  if (tensor->dtype() == DataType::kString) {
    const auto* strings = static_cast<const ServingBytes*>(from.values);
    for (size_t i = 0; i < from.num_values; ++i) {
      tensor->SetString(static_cast<int64_t>(i),
                        {strings[i].data, strings[i].size});
    }
  } else if (from.num_values > 0) {
    std::memcpy(tensor->data(), from.values, tensor->num_bytes());
  }
  return tensor;
}

void AddOutput(const std::string& name, const Tensor& tensor,
               const ServingAnswer* answer) {
  const std::vector<int64_t> dims = tensor.shape();
  std::vector<ServingBytes> strings;
  const void* values = tensor.data();
  if (tensor.dtype() == DataType::kString) {
    for (int64_t i = 0; i < tensor.num_values(); ++i) {
      strings.push_back(BytesOf(tensor.string(i)));
    }
    values = strings.data();
  }
  const ServingTensor output = {
      BytesOf(name), static_cast<int32_t>(tensor.dtype()),
      dims.data(),   dims.size(),
      values,        static_cast<size_t>(tensor.num_values())};
  answer->add_output(answer->answer, &output);
}

// Answers requests with the predictor, after Serve() has set it; before that,
// with an error. Thread-safe.
class Handler {
 public:
  explicit Handler(const std::string& model_name) : model_name_(model_name) {}

  // REQUIRES: the predictor exists until no more requests arrive.
  void Serve(const Predictor* predictor) { predictor_ = predictor; }

  ServingHandler Functions() {
    return {this, &Handler::Predict, &Handler::GetMetadata, &Handler::GetStatus,
            &Handler::GetNumbers};
  }

 private:
  // Returns the predictor if the request is for its model; else answers with an
  // error and returns null.
  static const Predictor* Find(void* context, const ServingModelSpec& model,
                               const ServingAnswer* answer) {
    const Handler& handler = *static_cast<const Handler*>(context);
    Status status;
    if (const std::string name = StringOf(model.name);
        name != handler.model_name_) {
      status = Error(StatusCode::kNotFound, "no model '", name, "'; it has: '",
                     handler.model_name_, "'");
    } else if (model.version_label.size > 0) {
      status = Error(StatusCode::kNotFound, "no version is labelled '",
                     StringOf(model.version_label),
                     "': this server knows versions by their numbers alone");
    } else if (const Predictor* predictor = handler.predictor_) {
      return predictor;
    } else {
      status = Error(StatusCode::kUnavailable, "model '", name,
                     "' is being loaded; try again");
    }
    SetError(status, answer);
    return nullptr;
  }

  static void Predict(void* context, const ServingRequest* call,
                      const ServingAnswer* answer) {
    const Predictor* predictor = Find(context, call->model, answer);
    if (predictor == nullptr) return;
    Request request;
    request.signature = StringOf(call->model.signature);
    request.version = call->model.version;
    if (call->timeout_ms > 0) {
      request.timeout = std::chrono::milliseconds(call->timeout_ms);
    }
    for (size_t i = 0; i < call->num_outputs; ++i) {
      request.outputs.push_back(StringOf(call->outputs[i]));
    }
    for (size_t i = 0; i < call->num_inputs; ++i) {
      Result<Tensor> tensor = ToTensor(call->inputs[i]);
      if (!tensor.ok()) return SetError(tensor.status(), answer);
      request.inputs[StringOf(call->inputs[i].name)] = *std::move(tensor);
    }
    const Result<Response> response = predictor->Predict(request);
    if (!response.ok()) return SetError(response.status(), answer);
    answer->set_model(answer->answer, response->version,
                      BytesOf(response->signature));
    for (const auto& [name, tensor] : response->outputs) {
      AddOutput(name, tensor, answer);
    }
  }

  static void GetMetadata(void* context, const ServingModelSpec* model,
                          const ServingAnswer* answer) {
    const Predictor* predictor = Find(context, *model, answer);
    if (predictor == nullptr) return;
    const auto version = predictor->current();
    const Status status = version->CheckVersion(model->version);
    if (!status.ok()) return SetError(status, answer);
    answer->set_model(answer->answer, version->version(), {nullptr, 0});
    for (const auto& [name, signature] : version->signatures()) {
      answer->add_signature(answer->answer, BytesOf(name),
                            BytesOf(signature.def));
    }
  }

  static void GetStatus(void* context, const ServingModelSpec* model,
                        const ServingAnswer* answer) {
    const Predictor* predictor = Find(context, *model, answer);
    if (predictor == nullptr) return;
    const Predictor::State state = predictor->state();
    const auto add = [&](int64_t version, int32_t number, StatusCode code,
                         std::string_view message) {
      if (model->version >= 0 && model->version != version) return;
      answer->add_version(answer->answer, version, number,
                          static_cast<int32_t>(code), BytesOf(message));
    };
    add(state.version, SERVING_STATE_AVAILABLE, StatusCode::kOk,
        state.rows.ok() ? Describe(*state.rows) : "");
    if (state.loading >= 0) {
      add(state.loading, SERVING_STATE_LOADING, StatusCode::kOk, "");
    }
    for (const auto& [version, status] : state.refused) {
      if (version == state.loading) continue;
      add(version, SERVING_STATE_END, status.code(), status.message());
    }
  }

  static ServingBytes GetNumbers(void* context, ServingNumbers* numbers) {
    const Handler& handler = *static_cast<const Handler*>(context);
    *numbers = {-1, 0};
    if (const Predictor* predictor = handler.predictor_) {
      const Predictor::State state = predictor->state();
      numbers->version = state.version;
      if (state.rows.ok() && state.rows->number > 0) {
        numbers->data_ms =
            std::chrono::duration_cast<std::chrono::milliseconds>(
                state.rows->created.time_since_epoch())
                .count();
      }
    }
    return BytesOf(handler.model_name_);
  }

  const std::string model_name_;
  std::atomic<const Predictor*> predictor_{nullptr};
};

std::filesystem::path FolderOfProgram() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path();
}

// Opens libtfswitch_serving_rpc.so with a symbol namespace of its own.
Result<const ServingRpcApi*> OpenRpc() {
  const std::string path = FolderOfProgram() / "libtfswitch_serving_rpc.so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
  if (library == nullptr) {
    return Error(StatusCode::kNotFound, "cannot open '", path, "': ", dlerror(),
                 ". It belongs beside tfswitch-serving, and needs gRPC");
  }
  const auto get_api = reinterpret_cast<ServingRpc_GetApiFn>(
      dlsym(library, "ServingRpc_GetApi"));
  const ServingRpcApi* api =
      get_api != nullptr ? get_api(SERVING_RPC_API_VERSION) : nullptr;
  if (api == nullptr) {
    return Error(StatusCode::kFailedPrecondition, "'", path,
                 "' is of another build than tfswitch-serving");
  }
  return api;
}

// Reports a wrong flag to the user or program that has passed the flag.
int FailForFlag(absl::string_view message) {
  LogNotStarted("tfswitch-serving", message);
  return kBadFlag;
}

// The last line of the log.
int Stopped(int code, const std::string& why, absl::Time started) {
  LogServerEvent(code == 0 ? LogLevel::kInfo : LogLevel::kError, "stopped",
                 {{"why", why}, {"seconds", SecondsSince(started)}});
  LogWriter::Get().Flush(absl::Seconds(1));
  return code;
}

// The values of the flags.
struct Settings {
  PredictorOptions predictor;
  std::string model_name = "default";
  std::string address = "127.0.0.1:8500";
  std::string http_address;
  std::string tags = "serve";
  double poll_secs = 1;
  double watch_rows_secs = 1;
  bool verify_rows_first = false;
  double grace_secs = 10;
  int32_t max_message_bytes = 64 << 20;
  int32_t max_requests = 256;
  std::string tls_cert, tls_key, tls_ca, token_file;
  bool insecure = false;
  bool reflection = false;
  std::string log_format = "text";
  bool help = false;

  std::vector<Flag> Flags();
  // Tells which value is wrong; empty if all are valid.
  std::string Fault() const;
};

std::vector<Flag> Settings::Flags() {
  // Rejects an empty file name, which may come from a variable that is not set:
  // the server must not fall back to plaintext.
  const auto file_flag = [](const char* name, std::string* path,
                            const char* text) {
    return Flag{name, path, text, /*may_be_empty=*/false};
  };
  return {
      {"model_dir", &predictor.model_dir,
       "a SavedModel, or a folder of versions: 1/, 2/, ..."},
      {"model_name", &model_name, "what requests call the model"},
      {"address", &address,
       "where to listen: host:port (port 0: any free one) or unix:/path"},
      {"http_address", &http_address, kHttpAddressHelp},
      {"op_library", &predictor.op_library,
       "library with the model's own ops; empty: none"},
      {"version", &predictor.version,
       "serve this version alone; -1: the newest"},
      {"signature", &predictor.model.signature,
       "signature of requests that name none"},
      {"tags", &tags, "of the graph in the SavedModel, with commas"},
      {"poll_secs", &poll_secs,
       "how often to look for versions; 0: only at the start"},
      {"watch_rows_secs", &watch_rows_secs,
       "how often to look for newer rows in the model's folder; 0: as "
       "TFSWITCH_SERVING_WATCH_SECS says, else never"},
      {"verify_rows_first", &verify_rows_first,
       "check all rows of a version before it serves, and not each block when "
       "it is first used; what comes later is always checked before"},
      {"grace_secs", &grace_secs,
       "how long running requests may take when the server is stopped"},
      {"max_message_bytes", &max_message_bytes,
       "longest message, and largest tensor of a request"},
      {"max_requests", &max_requests,
       "requests that run at a time; more get RESOURCE_EXHAUSTED"},
      {"intra_op_threads", &predictor.model.intra_op_threads,
       "threads for the work inside of ops; 0: one per core"},
      {"inter_op_threads", &predictor.model.inter_op_threads,
       "threads that run ops; 0: one per core; -1: none, a request runs in the "
       "thread that took it, and small models answer sooner"},
      file_flag("tls_cert", &tls_cert, kTlsCertHelp),
      file_flag("tls_key", &tls_key, kTlsKeyHelp),
      file_flag("tls_ca", &tls_ca, kTlsCaHelp),
      file_flag("token_file", &token_file, kTokenFileHelp),
      {"insecure", &insecure, kInsecureHelp},
      {"reflection", &reflection, kReflectionHelp},
      {"log_format", &log_format,
       "how events are written to stderr: text, or json for one object a line"},
      {"help", &help, "prints this text"},
  };
}

std::string Settings::Fault() const {
  if (predictor.model_dir.empty()) return "give --model_dir";
  if (log_format != "text" && log_format != "json") {
    return "flag --log_format must be text or json, got '" + log_format + "'";
  }
  if (poll_secs >= 0 && watch_rows_secs >= 0 && grace_secs >= 0 &&
      max_message_bytes >= 1 && max_requests >= 1) {
    return "";
  }
  return "--poll_secs, --watch_rows_secs and --grace_secs must not be "
         "negative, --max_message_bytes and --max_requests must be positive";
}

// Serves until it receives one of `stop_signals`, which must be blocked.
// `flags` are the flags of the command line, for the log.
int Serve(const Settings& settings, const sigset_t& stop_signals,
          const std::string& flags) {
  const absl::Time started = SteadyNow();
  const Result<const ServingRpcApi*> api = OpenRpc();
  if (!api.ok()) return Stopped(kCannotServe, api.status().message(), started);
  Handler handler(settings.model_name);
  const ServingHandler functions = handler.Functions();
  const ServingRpcOptions rpc_options = {
      settings.address.c_str(),    settings.max_message_bytes,
      settings.max_requests,       settings.tls_cert.c_str(),
      settings.tls_key.c_str(),    settings.tls_ca.c_str(),
      settings.token_file.c_str(), settings.insecure,
      settings.reflection,         settings.http_address.c_str()};
  int32_t code = 0;
  char error[1024];
  ServingRpcServer* server =
      (*api)->start(&rpc_options, &functions, &code, error, sizeof(error));
  if (server == nullptr) {
    const auto bad = static_cast<int32_t>(StatusCode::kInvalidArgument);
    return code == bad ? FailForFlag(error)
                       : Stopped(kCannotServe, error, started);
  }
  LogServerEvent(LogLevel::kInfo, "started",
                 {{"version", TFSWITCH_VERSION},
                  {"address", (*api)->address(server)},
                  {"http", (*api)->http_address(server)},
                  {"model_dir", settings.predictor.model_dir},
                  {"flags", flags}});
  // The server already answers health checks, so a program that has read this
  // line may ask for the server's health.
  std::printf("listening on %s\n", (*api)->address(server));
  std::fflush(stdout);

  // Loads the model in another thread, because this thread waits for the signal
  // to stop, which may arrive before the model is loaded.
  absl::Mutex mutex;
  bool stopping = false;
  std::unique_ptr<Predictor> predictor;
  std::thread loader([&] {
    auto loaded = Predictor::Load(settings.predictor);
    if (!loaded.ok()) {
      _exit(Stopped(kCannotServe, loaded.status().message(), started));
    }
    absl::MutexLock lock(&mutex);
    predictor = *std::move(loaded);
    if (stopping) return;
    handler.Serve(predictor.get());
    (*api)->set_serving(server, 1);
  });

  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  // The next one kills.
  signal(SIGTERM, SIG_DFL);
  signal(SIGINT, SIG_DFL);
  pthread_sigmask(SIG_UNBLOCK, &stop_signals, nullptr);
  {
    absl::MutexLock lock(&mutex);
    stopping = true;
  }
  const double grace_secs = std::min(settings.grace_secs, kMaxGrace);
  std::promise<void> stopped;
  const auto stop = [&] {
    (*api)->stop(server, static_cast<int64_t>(grace_secs * 1000));
    stopped.set_value();
  };
  try {
    std::thread(stop).detach();
  } catch (const std::system_error&) {
    stop();
  }
  // Waits only for a limited time, because gRPC waits for peers that do not
  // read, and because a version may just be loaded or freed.
  stopped.get_future().wait_for(
      std::chrono::duration<double>(grace_secs + kTimeToClose));
  _exit(Stopped(0, strsignal(signal_number), started));
}

int Run(int argc, char** argv) {
  // Blocks the signals before any thread starts, so that they are blocked in
  // all. sigwait() receives them in ordinary code, which may call any function.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  // SIGPIPE would kill the server when the reader of its stderr exits.
  signal(SIGPIPE, SIG_IGN);

  Settings settings;
  PredictorOptions& options = settings.predictor;
  options.op_library = OpLibraryPath();
  options.catch_bus_errors = true;
  const std::vector<Flag> flags = settings.Flags();
  const std::string usage = FlagsHelp(argv[0], flags);
  const std::string bad_flag = ParseFlags(argc, argv, flags);
  if (settings.help) {
    std::printf("%s", usage.c_str());
    return 0;
  }
  if (settings.log_format == "json") UseJsonLog();
  if (!bad_flag.empty()) return FailForFlag(bad_flag);
  if (const std::string fault = settings.Fault(); !fault.empty()) {
    return FailForFlag(fault);
  }
  options.poll_interval = Seconds(settings.poll_secs);
  options.watch_rows_interval = Seconds(settings.watch_rows_secs);
  // The core reads this variable when it opens rows. Setting it is safe,
  // because there are no other threads yet.
  if (settings.verify_rows_first) {
    setenv("TFSWITCH_SERVING_VERIFY_FIRST", "1", 1);
  }
  options.model.tags = absl::StrSplit(settings.tags, ',');
  ShowServerEvents();
  return Serve(settings, stop_signals,
               absl::StrJoin(argv + 1, argv + argc, " "));
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) { return tfswitch::Run(argc, argv); }
