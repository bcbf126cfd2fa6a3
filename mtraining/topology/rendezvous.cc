#include "mtraining/topology/rendezvous.h"

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "mtraining/base/check.h"

namespace mtraining::topology {
namespace {

constexpr size_t kMostHosts = 100000;
constexpr int kCandidates = 16;
/// Below 32768, where Linux begins to give ports to outgoing connections.
constexpr uint64_t kFirstPort = 10000, kPorts = 20000;

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || stop != end || value < 0) return std::nullopt;
  return value;
}

/// Splits at the commas outside brackets.
std::vector<std::string_view> split(std::string_view text, std::string_view whole) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : ',';
    if (c == '[') ++depth;
    if (c == ']') --depth;
    MT_CHECK_ARG(depth == 0 || (depth == 1 && i < text.size()),
                 "list of hosts: expected a form such as node[01-04,7], got '", whole, "'");
    if (c == ',' && depth == 0) {
      parts.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  return parts;
}

std::string padded(int64_t number, size_t width) {
  std::string digits = std::to_string(number);
  return digits.size() < width ? std::string(width - digits.size(), '0') + digits : digits;
}

/// "01-03" -> 01, 02, 03.
void add_range(std::string_view range, std::string_view whole, std::vector<std::string>& out) {
  const size_t dash = range.find('-');
  const std::string_view first = range.substr(0, dash);
  const std::string_view last = dash == std::string_view::npos ? first : range.substr(dash + 1);
  const auto begin = whole_number(first), end = whole_number(last);
  MT_CHECK_ARG(begin && end && *begin <= *end &&
                   static_cast<uint64_t>(*end - *begin) < kMostHosts - out.size(),
               "list of hosts: expected a range such as 01-04 in brackets, got '", range, "' in '",
               whole, "'");
  for (int64_t i = *begin; i <= *end; ++i) out.push_back(padded(i, first.size()));
}

std::vector<std::string> expand_one(std::string_view text, std::string_view whole) {
  const size_t open = text.find('[');
  if (open == std::string_view::npos) return {std::string(text)};
  const size_t close = text.find(']', open);
  std::vector<std::string> numbers;
  for (const std::string_view range : split(text.substr(open + 1, close - open - 1), whole))
    add_range(range, whole, numbers);
  const std::vector<std::string> rest = expand_one(text.substr(close + 1), whole);
  MT_CHECK_ARG(numbers.size() * rest.size() <= kMostHosts, "list of hosts: expected at most ",
               kMostHosts, " hosts in '", whole, "'");
  std::vector<std::string> hosts;
  for (const std::string& number : numbers)
    for (const std::string& tail : rest)
      hosts.push_back(std::string(text.substr(0, open)) + number + tail);
  return hosts;
}

class Reader {
 public:
  explicit Reader(const VariableLookup& lookup) : lookup_(lookup) {}
  std::string text(const char* name) const {
    const char* value = lookup_(name);
    return value == nullptr ? "" : value;
  }
  std::string first_of(std::initializer_list<const char*> names) const {
    for (const char* name : names)
      if (std::string value = text(name); !value.empty()) return value;
    return "";
  }

 private:
  const VariableLookup& lookup_;
};

/// Of this launch of the launcher; "" where it does not say.
std::string job_id(const LaunchEnvironment& launch, const Reader& env) {
  if (launch.launcher == "torchrun") {
    const std::string run = env.text("TORCHELASTIC_RUN_ID");
    if (run.empty()) return "";
    return concat("torchrun ", run, " ", env.text("TORCHELASTIC_RESTART_COUNT"), " ",
                  env.text("MASTER_ADDR"), " ", env.text("MASTER_PORT"));
  }
  if (launch.launcher == "mpirun") {
    const std::string id = env.first_of({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"});
    if (id.empty()) return "";
    return concat("mpirun ", id, " ", env.text("OMPI_MCA_orte_precondition_transports"));
  }
  const std::string id = env.first_of({"SLURM_JOB_ID", "SLURM_JOBID"});
  if (id.empty()) return "";
  return concat("srun ", id, " ", env.first_of({"SLURM_STEP_ID", "SLURM_STEPID"}), " ",
                env.text("SLURM_RESTART_COUNT"));
}

std::vector<int> ports_of(const std::string& job) {
  uint64_t hash = 1469598103934665603u;  // FNV-1a
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  hash ^= hash >> 32;  // its low bits alone mix short names badly
  std::vector<int> ports;
  for (int i = 0; i < kCandidates; ++i)
    ports.push_back(
        static_cast<int>(kFirstPort + (hash + 997u * static_cast<uint64_t>(i)) % kPorts));
  return ports;
}

std::string slurm_hosts(const Reader& env) {
  return env.first_of({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
}

bool on_one_host(const LaunchEnvironment& launch, const Reader& env) {
  if (launch.local_world_size) return *launch.local_world_size == launch.world_size;
  if (launch.launcher != "srun") return false;
  const std::string nodes = env.first_of({"SLURM_STEP_NUM_NODES", "SLURM_NNODES"});
  if (!nodes.empty()) return nodes == "1";
  const std::string hosts = slurm_hosts(env);
  return !hosts.empty() && expand_host_list(hosts).size() == 1;
}

std::string find_address(const LaunchEnvironment& launch, const Reader& env, bool one_host) {
  if (launch.launcher != "torchrun") {
    if (one_host) return "127.0.0.1";
    if (const std::string hosts = slurm_hosts(env); !hosts.empty())
      return expand_host_list(hosts).front();
    if (const std::string host = env.text("SLURM_LAUNCH_NODE_IPADDR"); !host.empty()) return host;
  }
  const std::string how = launch.launcher == "mpirun" ? " (mpirun -x MASTER_ADDR=HOST ..)" : "";
  throw InvalidArgument(concat("environment variable MASTER_ADDR: expected the host of rank 0 for ",
                               launch.world_size, " ranks of ", launch.launcher,
                               launch.launcher == "torchrun" ? "" : " on several hosts", how,
                               ", got nothing"));
}

}  // namespace

std::vector<std::string> expand_host_list(std::string_view text) {
  std::vector<std::string> hosts;
  for (const std::string_view part : split(text, text)) {
    MT_CHECK_ARG(!part.empty(), "list of hosts: expected names with a comma between, got '", text,
                 "'");
    for (std::string& host : expand_one(part, text)) hosts.push_back(std::move(host));
    MT_CHECK_ARG(hosts.size() <= kMostHosts, "list of hosts: expected at most ", kMostHosts,
                 " hosts in '", text, "'");
  }
  return hosts;
}

std::vector<int> expand_tasks_per_node(std::string_view text) {
  std::vector<int> tasks;
  const std::string_view whole = text;
  while (true) {
    const size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    const size_t paren = part.find("(x");
    const auto count = whole_number(part.substr(0, paren));
    std::optional<int64_t> times = 1;
    if (paren != std::string_view::npos) {
      times = part.back() == ')' ? whole_number(part.substr(paren + 2, part.size() - paren - 3))
                                 : std::nullopt;
    }
    MT_CHECK_ARG(count && times && *count < (1 << 20) && *times >= 1 &&
                     static_cast<uint64_t>(*times) <= kMostHosts - tasks.size(),
                 "tasks of each node: expected a form such as 2(x3),1, got '", whole, "'");
    tasks.insert(tasks.end(), static_cast<size_t>(*times), static_cast<int>(*count));
    if (comma == std::string_view::npos) return tasks;
    text = text.substr(comma + 1);
  }
}

Rendezvous find_rendezvous(const LaunchEnvironment& launch, const VariableLookup& lookup) {
  const Reader env(lookup);
  Rendezvous result;
  result.one_host = on_one_host(launch, env);
  result.address = env.text("MASTER_ADDR");
  result.address_is_given = !result.address.empty();
  if (!result.address_is_given) result.address = find_address(launch, env, result.one_host);

  const std::string port = env.text("MASTER_PORT");
  const auto number = whole_number(port);
  MT_CHECK_ARG(port.empty() || (number && *number > 0 && *number < 65536),
               "environment variable MASTER_PORT: expected 1 to 65535, got '", port, "'");
  result.job = job_id(launch, env);
  const bool agent_has_it =
      launch.launcher == "torchrun" && env.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  result.port_is_given = number.has_value() && !(agent_has_it && !result.job.empty());
  if (result.port_is_given) {
    result.ports = {static_cast<int>(*number)};
    if (result.job.empty()) result.job = concat("port ", port);
    return result;
  }
  MT_CHECK_ARG(!result.job.empty(), "environment variable MASTER_PORT: expected a free port of ",
               result.address, " for ", launch.world_size, " ranks of ", launch.launcher,
               ", which gives no job id to derive one from, got nothing");
  result.ports = ports_of(result.job);
  return result;
}

Rendezvous find_rendezvous(const LaunchEnvironment& launch) {
  return find_rendezvous(launch, [](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace mtraining::topology
