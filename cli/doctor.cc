#include "cli/doctor.h"

#include <c10/util/Logging.h>
#include <dlfcn.h>
#include <torch/version.h>

#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/gpus.h"
#include "cli/link_speed.h"
#include "cli/parse_options.h"
#include "cli/printed.h"
#include "cli/system_facts.h"
#include "mtraining/base/check.h"
#include "mtraining/kernels/dispatch.h"
#include "mtraining/kernels/ref/tile_ops.h"
#include "mtraining/topology/rendezvous.h"

namespace mtraining::cli {
namespace {

using Json = nlohmann::ordered_json;
constexpr double kGiB = 1024.0 * 1024 * 1024;

constexpr const char* kFooter = R"(
Each line is ok, note (training runs, something is slower or absent) or FAIL (training does not run) with its remedy.
Exit code: 0 where nothing fails, else 1.

examples:
  mtraining doctor
  mtraining doctor --out /data/runs/one --json
  srun --ntasks 8 mtraining doctor --no-links        what each rank sees of its launcher
)";

enum class Verdict { kOk, kNote, kFail };
const char* to_string(Verdict verdict) {
  return verdict == Verdict::kOk ? "ok" : verdict == Verdict::kNote ? "note" : "FAIL";
}

struct Check {
  std::string name;
  Verdict verdict = Verdict::kOk;
  std::string text, remedy;
};

std::string gib(int64_t bytes) { return number("%.1f GiB", static_cast<double>(bytes) / kGiB); }

class Report {
 public:
  void ok(const std::string& name, const std::string& text) {
    checks_.push_back({name, Verdict::kOk, text, ""});
  }
  void judge(const std::string& name, Verdict verdict, const std::string& text,
             const std::string& remedy) {
    checks_.push_back({name, verdict, text, verdict == Verdict::kOk ? "" : remedy});
  }
  bool usable() const {
    for (const Check& check : checks_)
      if (check.verdict == Verdict::kFail) return false;
    return true;
  }
  const std::vector<Check>& checks() const { return checks_; }
  Json facts = Json::object();  ///< further keys of --json

 private:
  std::vector<Check> checks_;
};

void check_torch(Report& report) {
  Dl_info where{};
  const auto symbol = reinterpret_cast<void*>(&c10::initLogging);
  const bool found = ::dladdr(symbol, &where) != 0 && where.dli_fname != nullptr;
  report.ok("torch", concat(TORCH_VERSION, found ? concat(" (", where.dli_fname, ")") : ""));
  report.facts["torch"] = TORCH_VERSION;
}

void check_system(Report& report, const SystemFacts& facts) {
  const bool few = facts.cores_of_quota > 0 && facts.cores_of_quota < facts.cores;
  report.judge("cores", few ? Verdict::kNote : Verdict::kOk,
               concat(facts.cores, few ? concat(", but a quota of ",
                                                number("%.1f", facts.cores_of_quota), " of them")
                                       : ""),
               "raise the container's CPU quota, or start fewer ranks");
  const int64_t least = int64_t{1} << 30;
  report.judge("memory", facts.available_bytes < least ? Verdict::kFail : Verdict::kOk,
               concat(gib(facts.memory_bytes), ", ", gib(facts.available_bytes), " available"),
               "free at least 1 GiB: libraries alone take .3 GiB a rank");
  const std::string isa = kernels::ref::tile_ops<float>().isa;
  report.judge("cpu kernels", isa == "baseline" ? Verdict::kNote : Verdict::kOk,
               concat("instruction set ", isa,
                      isa == "v4"   ? " (AVX-512)"
                      : isa == "v3" ? " (AVX2, FMA)"
                                    : ""),
               "a processor with AVX2 and FMA computes several times faster; MTRAINING_REF_ISA "
               "must not ask for less");
  report.facts["cpu_kernels"] = isa;
  report.facts["cores"] = facts.cores;
  report.facts["memory_bytes"] = facts.memory_bytes;
}

void check_shared_memory(Report& report, const SystemFacts& facts, bool gpus) {
  const char* remedy =
      "NCCL keeps its buffers there: docker run --shm-size=16g, or mount -o remount,size=16g "
      "/dev/shm";
  if (facts.shm_bytes < 0) {
    report.judge("/dev/shm", gpus ? Verdict::kFail : Verdict::kNote, "there is none", remedy);
    return;
  }
  const bool small = facts.shm_free_bytes < (int64_t{1} << 30);
  report.judge("/dev/shm",
               !small ? Verdict::kOk
               : gpus ? Verdict::kFail
                      : Verdict::kNote,
               concat(gib(facts.shm_bytes), ", ", gib(facts.shm_free_bytes), " free",
                      gpus ? "" : " (used with GPUs only)"),
               remedy);
}

void check_limits(Report& report, const SystemFacts& facts) {
  const int64_t files = facts.open_files;
  report.judge("open files",
               files < 0 || files >= 1024 ? Verdict::kOk
               : files >= 256             ? Verdict::kNote
                                          : Verdict::kFail,
               files < 0 ? "no limit" : concat("at most ", files),
               "a rank keeps a connection to each other rank for each communicator, besides shards "
               "of weights: ulimit -n 65536");
  report.judge("out folder",
               !facts.out_error.empty()           ? Verdict::kFail
               : facts.out_free_bytes < (1 << 30) ? Verdict::kNote
                                                  : Verdict::kOk,
               facts.out_error.empty()
                   ? concat(facts.out_folder, ": ", gib(facts.out_free_bytes), " free")
                   : concat(facts.out_folder, ": cannot be written: ", facts.out_error),
               facts.out_error.empty() ? "checkpoints take 14 bytes a parameter each"
                                       : "give another folder with --out, or make it writable");
}

void check_gpus(Report& report, const GpuFacts& facts) {
  Json list = Json::array();
  for (const Gpu& gpu : facts.gpus) {
    list.push_back({{"name", gpu.name},
                    {"capability", concat(gpu.kind.major, ".", gpu.kind.minor)},
                    {"sms", gpu.kind.num_sms},
                    {"memory_bytes", gpu.memory_bytes},
                    {"free_bytes", gpu.free_bytes},
                    {"peers", gpu.peers}});
  }
  report.facts["gpus"] = list;
  report.facts["cuda"] = {{"built", facts.built_with_cuda},
                          {"runtime", facts.runtime_version},
                          {"driver", facts.driver_version},
                          {"nccl", facts.nccl_version}};
  if (!facts.built_with_cuda) {
    report.judge("cuda", facts.hardware ? Verdict::kNote : Verdict::kOk,
                 facts.hardware ? "this build has none, though the machine has an NVIDIA device"
                                : "this build has none; training runs on the CPU",
                 "install the CUDA 13.0 toolkit (nvcc) and build again: ./dev build");
    return;
  }
  report.ok("nccl", facts.nccl_version);
  if (facts.driver_version.empty()) {
    report.judge("driver", facts.hardware ? Verdict::kFail : Verdict::kNote,
                 facts.hardware ? concat("the NVIDIA device cannot be used: ", facts.error)
                                : "none; training runs on the CPU",
                 "install NVIDIA's driver 580 or newer (CUDA 13.0); in a container: docker run "
                 "--gpus all");
    return;
  }
  const bool old =
      std::atof(facts.driver_version.c_str()) < std::atof(facts.runtime_version.c_str());
  report.judge("driver", old && facts.gpus.empty() ? Verdict::kFail : Verdict::kOk,
               concat("for CUDA ", facts.driver_version, "; this build runs with ",
                      facts.runtime_version, facts.error.empty() ? "" : concat(": ", facts.error)),
               "install NVIDIA's driver 580 or newer (CUDA 13.0)");
  if (facts.gpus.empty() && !old) {
    report.judge("gpu", Verdict::kNote, facts.error.empty() ? "none is visible" : facts.error,
                 "CUDA_VISIBLE_DEVICES may hide them; nvidia-smi -L lists what there is");
  }
  for (size_t i = 0; i < facts.gpus.size(); ++i) {
    const Gpu& gpu = facts.gpus[i];
    const bool kernels = gpu.kind.capability() >= 80;
    report.judge(concat("gpu ", i), kernels ? Verdict::kOk : Verdict::kNote,
                 concat(gpu.name, ", capability ", gpu.kind.major, ".", gpu.kind.minor, ", ",
                        gpu.kind.num_sms, " SMs, ", gib(gpu.free_bytes), " of ",
                        gib(gpu.memory_bytes), " free, reaches ", gpu.peers, " others directly"),
                 "kernels need capability 8.0 (A100) or newer");
  }
}

/// Which back end serves each dtype and head_dim, by the table that a call asks.
void check_kernels(Report& report, const GpuFacts& facts) {
  const std::vector<int64_t> head_dims = {64, 96, 128, 256};
  const std::vector<kernels::DType> dtypes = {kernels::DType::kFloat32, kernels::DType::kBFloat16,
                                              kernels::DType::kFloat16};
  std::vector<kernels::DeviceKind> devices = {{}};
  for (const Gpu& gpu : facts.gpus) {
    const bool listed = std::any_of(devices.begin(), devices.end(), [&](const auto& d) {
      return d.cuda && d.capability() == gpu.kind.capability();
    });
    if (!listed) devices.push_back(gpu.kind);
  }
  Json rows = Json::array();
  for (const kernels::DeviceKind& device : devices) {
    const std::string where = device.cuda ? concat("sm_", device.capability()) : "cpu";
    if (device.cuda) {
      kernels::Request dense;
      dense.device = device;
      dense.dense_alone = true;
      const std::string backend = kernels::to_string(kernels::choose(dense).backend);
      report.judge(
          concat("dense alone ", where), Verdict::kOk,
          concat("causal attention over every pair where one GPU holds the sequence: ", backend,
                 backend == "torch" ? " (cuDNN for bf16 and fp16 up to head_dim 128, else "
                                      "memory-efficient; backward of a deterministic run: "
                                      "our kernels)"
                                    : ""),
          "");
      report.facts[concat("dense_alone_", where)] = backend;
    }
    for (const auto direction : {kernels::Direction::kForward, kernels::Direction::kBackward}) {
      std::string line;
      bool all = true;
      for (const kernels::DType dtype : dtypes) {
        for (const int64_t head_dim : head_dims) {
          kernels::Request request;
          request.direction = direction;
          request.device = device;
          request.dtype = dtype;
          request.head_dim = head_dim;
          std::string backend;
          try {
            backend = kernels::to_string(kernels::choose(request).backend);
          } catch (const Unsupported&) {
            all = false;
          }
          rows.push_back({{"device", where},
                          {"direction", kernels::to_string(direction)},
                          {"dtype", kernels::to_string(dtype)},
                          {"head_dim", head_dim},
                          {"backend", backend.empty() ? Json(nullptr) : Json(backend)}});
          line += concat(line.empty() ? "" : ", ", kernels::to_string(dtype), " x ", head_dim, " ",
                         backend.empty() ? "none" : backend);
        }
      }
      const std::string name = concat("kernels ", where, " ", kernels::to_string(direction));
      report.judge(name, all ? Verdict::kOk : Verdict::kNote, line,
                   "a call without a kernel is refused by name; bf16 is what GPUs train with");
    }
  }
  report.facts["kernels"] = rows;
}

void check_links(Report& report, const SystemFacts& system, const GpuFacts& gpus, bool measure) {
  report.judge("host name", system.host_resolves ? Verdict::kOk : Verdict::kNote,
               concat(system.host, system.host_resolves ? " resolves" : " does not resolve"),
               "ranks on several hosts need it: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME "
               "to the interface that other hosts reach");
  if (!system.loopback_error.empty()) {
    report.judge("loopback", Verdict::kFail, system.loopback_error,
                 "ranks of one host meet there: ip link set lo up");
    return;
  }
  if (!measure) return;
  const auto link = [&](const char* name, const char* backend, int ranks, int64_t bytes,
                        const char* remedy, Verdict without = Verdict::kFail) {
    try {
      const LinkSpeed speed = measure_link(backend, ranks, bytes, 4);
      report.ok(name, concat(number("%.2f GB/s", speed.bytes_per_s * 1e-9), " a rank, ",
                             number("%.0f us", speed.small_us), " for 8 bytes (", ranks,
                             " ranks over ", backend, ")"));
      report.facts["links"][backend] = {
          {"ranks", ranks}, {"bytes_per_s", speed.bytes_per_s}, {"small_us", speed.small_us}};
    } catch (const std::exception& error) {
      report.judge(name, without, error.what(), remedy);
    }
  };
  link("loopback link", "gloo", 2, int64_t{16} << 20, "ranks talk over 127.0.0.1: see the cause");
  const int count = static_cast<int>(gpus.gpus.size());
  if (count >= 2) {
    link("gpu link", "nccl", count, int64_t{256} << 20,
         "NCCL_DEBUG=WARN says more; NCCL_P2P_DISABLE=1 goes around broken peer access");
    link("gpu copies", "peer_copies", count, int64_t{256} << 20,
         "attention.transfers = \"peer_copies\" is not for this machine; \"collectives\" (nccl) is",
         Verdict::kNote);
  }
}

void check_launcher(Report& report) {
  Json facts = Json::object();
  try {
    const topology::LaunchEnvironment launch = topology::read_launch_environment();
    facts = {{"name", launch.launcher},
             {"rank", launch.rank},
             {"world_size", launch.world_size},
             {"local_rank", launch.local_rank},
             {"local_world_size",
              launch.local_world_size ? Json(*launch.local_world_size) : Json(nullptr)}};
    std::string text = launch.launcher == "none" ? "none: --nproc N starts ranks here"
                                                 : concat(launch.launcher, ": rank ", launch.rank,
                                                          " of ", launch.world_size);
    if (launch.world_size > 1) {
      const topology::Rendezvous meeting = topology::find_rendezvous(launch);
      facts["address"] = meeting.address;
      facts["ports"] = meeting.ports;
      text += concat(", ",
                     launch.local_world_size ? std::to_string(*launch.local_world_size)
                                             : std::string("an unknown number"),
                     " on this host; ranks meet at ", meeting.address, ":", meeting.ports.front(),
                     meeting.port_is_given ? "" : " or one of the ports after it");
    }
    report.ok("launcher", text);
  } catch (const InvalidArgument& error) {
    report.judge("launcher", Verdict::kFail, error.what(),
                 "set or unset what is named; docs/training.md, Launching");
  }
  report.facts["launcher"] = facts;
}

void print(const Report& report, bool as_json) {
  if (as_json) {
    Json json = {{"usable", report.usable()}};
    Json checks = Json::array();
    for (const Check& check : report.checks()) {
      Json item = {
          {"name", check.name}, {"verdict", to_string(check.verdict)}, {"text", check.text}};
      if (!check.remedy.empty()) item["remedy"] = check.remedy;
      checks.push_back(item);
    }
    json["checks"] = checks;
    json.update(report.facts);
    std::cout << json.dump(2, ' ', false, Json::error_handler_t::replace) << "\n";
  } else {
    for (const Check& check : report.checks()) {
      std::string head = to_string(check.verdict);
      head.resize(6, ' ');
      head += check.name;
      head.resize(std::max<size_t>(head.size() + 1, 30), ' ');
      std::cout << head << check.text << "\n";
      if (!check.remedy.empty()) std::cout << "        remedy: " << check.remedy << "\n";
    }
    std::cout << (report.usable() ? "training runs here" : "training does not run here") << "\n";
  }
}

}  // namespace

int run_doctor(int argc, char** argv) {
  CLI::App app("What this machine has for training, and what it lacks, with the remedy",
               "mtraining doctor");
  app.footer(kFooter);
  bool as_json = false, no_links = false;
  std::string out = "runs";
  app.add_flag("--json", as_json, "prints one JSON object");
  app.add_flag("--no-links", no_links, "does not measure links, which takes a second");
  app.add_option("--out", out, "the folder that runs will write to (default runs)");
  if (!parse_options(app, "doctor", argc, argv)) return 0;
  ::setenv("TORCH_CPP_LOG_LEVEL", "ERROR", 0);
  c10::initLogging();
  Report report;
  const SystemFacts system = read_system_facts(out);
  const GpuFacts gpus = read_gpu_facts();
  check_torch(report);
  check_gpus(report, gpus);
  check_kernels(report, gpus);
  check_system(report, system);
  check_shared_memory(report, system, !gpus.gpus.empty());
  check_limits(report, system);
  check_launcher(report);
  check_links(report, system, gpus, !no_links);
  print(report, as_json);
  return report.usable() ? 0 : 1;
}

}  // namespace mtraining::cli
