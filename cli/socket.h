// Socket: one connection that carries lines of text, and the two ways to get one.
//
// In:   an address and a port. Out: lines. Next: meeting.cc.
//
// Never blocks longer than it is told to. A peer that is gone looks like one that has ended the connection.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace mtraining::cli {

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd);  ///< takes it
  ~Socket();
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;

  int fd() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close();
  /// False where the peer is gone or has not taken it within a second.
  bool send_line(const std::string& line);
  /// Takes what has come; false when the connection has ended (lines that came before are still there).
  bool receive();
  /// The next whole line of what was received, without its end.
  std::optional<std::string> line();
  /// Waits for one line. Nothing where none comes in time or the connection ends.
  std::optional<std::string> wait_line(std::chrono::milliseconds timeout);

 private:
  int fd_ = -1;
  std::string inbox_;
};

/// Connects to one port. A socket that is not open where nobody answers within `timeout`.
Socket connect_to(const std::string& address, int port, std::chrono::milliseconds timeout);
/// Listens on the loopback address or on all. `error` says why not where the socket is not open.
Socket listen_on(int port, bool loopback, int& error);
Socket accept_from(const Socket& listener);

}  // namespace mtraining::cli
