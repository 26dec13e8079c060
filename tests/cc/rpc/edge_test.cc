#include "cc/rpc/edge/edge.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <string>

namespace tfswitch {
namespace {

// A connection with TLS, of which the server has read the ClientHello.
class Connection {
 public:
  explicit Connection(char random, size_t hello_pieces = 1)
      : random_(32, random) {
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_.data()), 0);
    sockaddr_storage address = {};
    address.ss_family = AF_INET;
    reinterpret_cast<sockaddr_in&>(address).sin_addr.s_addr =
        htonl(INADDR_LOOPBACK + static_cast<uint32_t>(random));
    Edge::Get().Watch(ends_[0], address, /*has_tls=*/true, /*max_streams=*/100);
    const std::string hello = std::string(11, 'h') + random_ + "and so on";
    for (size_t i = 0; i < hello_pieces; ++i) {
      const size_t begin = i * hello.size() / hello_pieces;
      const size_t end = (i + 1) * hello.size() / hello_pieces;
      std::string bytes = hello.substr(begin, end - begin);
      const iovec part = {bytes.data(), bytes.size()};
      EXPECT_TRUE(Edge::Get().Pass(Direction::kReceived, ends_[0], &part,
                                   bytes.size()));
    }
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() {
    Edge::Get().Forget(ends_[0]);
    close(ends_[0]);
    close(ends_[1]);
  }

  Edge::TlsConnection Find() const {
    return Edge::Get().FindTls(
        {reinterpret_cast<const uint8_t*>(random_.data()), random_.size()});
  }

  bool IsOpen() const {
    char byte = 0;
    return recv(ends_[0], &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0;
  }

 private:
  const std::string random_;
  std::array<int, 2> ends_ = {};
};

// More header bytes than a block may have.
bool Flood(const Edge::TlsConnection& tls) {
  const std::string frame("\0\xff\xff\1\0\0\0\0\1", 9);
  std::string bytes = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame +
                      std::string(0xffff, 'x') + frame +
                      std::string(0xffff, 'x');
  return Edge::Get().PassTls(Direction::kReceived, tls, bytes.data(),
                             bytes.size());
}

TEST(EdgeTest, BytesOfTlsCountForTheConnectionThatSentThem) {
  const Connection flooder('a');
  const Connection honest('b', /*hello_pieces=*/5);
  const Edge::TlsConnection tls = flooder.Find();  // After another was read.
  EXPECT_NE(honest.Find().guard, nullptr);

  EXPECT_FALSE(Flood(tls));

  EXPECT_FALSE(flooder.IsOpen());
  EXPECT_TRUE(honest.IsOpen());
}

TEST(EdgeTest, AnUnknownTlsConnectionMayNotGoOn) {
  const Connection first('c');
  EXPECT_NE(first.Find().guard, nullptr);

  const Edge::TlsConnection again = first.Find();

  EXPECT_EQ(again.guard, nullptr);
  EXPECT_FALSE(Edge::Get().PassTls(Direction::kReceived, again, "x", 1));
  EXPECT_TRUE(first.IsOpen());
}

}  // namespace
}  // namespace tfswitch
