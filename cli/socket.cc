#include "cli/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

namespace mtraining::cli {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
constexpr size_t kLongestLine = 1 << 20;

/// Whether `events` came within the time.
bool wait_for(int fd, short events, milliseconds timeout) {
  pollfd item{fd, events, 0};
  const auto end = Clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now()).count();
    const int got = ::poll(&item, 1, static_cast<int>(left > 0 ? left : 0));
    if (got >= 0 || errno != EINTR) return got > 0;
  }
}

Socket connect_once(const addrinfo& target, milliseconds timeout) {
  Socket socket(::socket(target.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.open()) return {};
  if (::connect(socket.fd(), target.ai_addr, target.ai_addrlen) != 0) {
    if (errno != EINPROGRESS || !wait_for(socket.fd(), POLLOUT, timeout)) return {};
    int error = 0;
    socklen_t length = sizeof(error);
    ::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return {};
  }
  // A port of the ephemeral range may connect to itself.
  sockaddr_storage mine{}, theirs{};
  socklen_t mine_length = sizeof(mine), their_length = sizeof(theirs);
  ::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&mine), &mine_length);
  ::getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&theirs), &their_length);
  const bool itself = mine_length == their_length &&
                      std::string(reinterpret_cast<char*>(&mine), mine_length) ==
                          std::string(reinterpret_cast<char*>(&theirs), their_length);
  return itself ? Socket() : std::move(socket);
}

}  // namespace

Socket::Socket(int fd) : fd_(fd) {}
Socket::~Socket() { close(); }
Socket::Socket(Socket&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), inbox_(std::move(other.inbox_)) {}
Socket& Socket::operator=(Socket&& other) noexcept {
  close();
  fd_ = std::exchange(other.fd_, -1);
  inbox_ = std::move(other.inbox_);
  return *this;
}

void Socket::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool Socket::send_line(const std::string& line) {
  const std::string text = line + "\n";
  size_t sent = 0;
  while (open() && sent < text.size()) {
    const ssize_t count = ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count > 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_for(fd_, POLLOUT, milliseconds(1000))) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return open();
}

bool Socket::receive() {
  char buffer[4096];
  while (open()) {
    const ssize_t count = ::recv(fd_, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (count > 0) {
      inbox_.append(buffer, static_cast<size_t>(count));
      if (inbox_.size() > kLongestLine) return false;
    } else if (count == 0) {
      return false;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return true;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return false;
}

std::optional<std::string> Socket::line() {
  const size_t end = inbox_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string result = inbox_.substr(0, end);
  inbox_.erase(0, end + 1);
  return result;
}

std::optional<std::string> Socket::wait_line(milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  while (open()) {
    if (auto result = line()) return result;
    const auto left = std::chrono::duration_cast<milliseconds>(end - Clock::now());
    if (left.count() <= 0 || !wait_for(fd_, POLLIN, left)) return std::nullopt;
    if (!receive()) return line();
  }
  return std::nullopt;
}

Socket connect_to(const std::string& address, int port, milliseconds timeout) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  Socket socket;
  for (const addrinfo* target = found; target != nullptr && !socket.open();
       target = target->ai_next)
    socket = connect_once(*target, timeout);
  ::freeaddrinfo(found);
  return socket;
}

Socket listen_on(int port, bool loopback, int& error) {
  const auto attempt = [&](int family, const sockaddr* address, socklen_t length) -> Socket {
    Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int yes = 1, no = 0;
    if (socket.open()) {
      // An ended run's connections may linger; a listener that is there is refused all the same.
      ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
      if (family == AF_INET6) ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
      if (::bind(socket.fd(), address, length) == 0 && ::listen(socket.fd(), 4096) == 0)
        return socket;
    }
    error = errno;
    return {};
  };
  if (!loopback) {
    sockaddr_in6 any{};
    any.sin6_family = AF_INET6;
    any.sin6_addr = in6addr_any;
    any.sin6_port = htons(static_cast<uint16_t>(port));
    Socket socket = attempt(AF_INET6, reinterpret_cast<const sockaddr*>(&any), sizeof(any));
    if (socket.open() || error == EADDRINUSE) return socket;  // else: a host without IPv6
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(loopback ? INADDR_LOOPBACK : INADDR_ANY);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return attempt(AF_INET, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

Socket accept_from(const Socket& listener) {
  return Socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

}  // namespace mtraining::cli
