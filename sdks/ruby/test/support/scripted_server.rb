# frozen_string_literal: true

require "openssl"
require "socket"

# A real HTTP server on a port of its own that does what a block says, one request after the other on each connection.
#
#   ScriptedServer.open { |request| request.answer(204) } do |server| … end
class ScriptedServer
  # `number`: from 1 on, in order of arrival. `connection`: from 1 on.
  class Request
    attr_reader :http_method, :path, :headers, :body, :number, :connection, :socket

    def initialize(socket, number, connection, http_method, path, headers, body)
      @socket = socket
      @number = number
      @connection = connection
      @http_method = http_method
      @path = path
      @headers = headers
      @body = body
      @streaming = false
    end

    def operation
      return "renew_many" if path == "/lock-leases"
      return "watch" if path.start_with?("/lock-events?")

      lease = path.end_with?("/lease")
      { "POST" => "acquire", "PATCH" => "renew", "DELETE" => lease ? "release" : "force_release", "GET" => "get" }.fetch(http_method)
    end

    def key
      path[%r{/locks/([^/]+)}, 1]
    end

    def answer(status, body = nil, **headers)
      body = JSON.generate(body) if body.is_a?(Hash)
      lines = ["HTTP/1.1 #{status} Whatever", *headers.map { |name, value| "#{name.to_s.tr("_", "-")}: #{value}" }]
      lines << "Content-Length: #{body.to_s.bytesize}" unless status == 204
      socket.write([*lines, "", body.to_s].join("\r\n"))
    end

    def grant(fencing_token: 7, **headers)
      answer(http_method == "POST" ? 201 : 200, { expires_at: "2026-11-29T12:00:00.000Z", fencing_token: fencing_token }, **headers)
    end

    # What a renew_many asks for: [{ "key" => …, "token" => …, "ttl_seconds" => … }, …].
    def leases
      JSON.parse(body).fetch("leases")
    end

    # Grants each lease of a renew_many, but for what the block says of it.
    def grant_each(fencing_token: 7)
      items = leases.map do |lease|
        good = { key: lease["key"], expires_at: "2026-11-29T12:00:00.000Z", expires_in: lease["ttl_seconds"], fencing_token: fencing_token }
        { **good, **((yield lease if block_given?) || {}) }
      end
      answer(200, { leases: items })
    end

    # The status and body of a lock server's refusal.
    def refuse(status, code, **headers)
      answer(status, { error: "No: #{code}.", code: code }, **headers)
    end

    # What a watch asks for: { "key" => ["a"], "prefix" => [] }.
    def filters
      { "key" => [], "prefix" => [], **URI.decode_www_form(path.split("?").last).group_by(&:first).transform_values { |pairs| pairs.map(&:last) } }
    end

    # Opens an event stream, and keeps it open until the client hangs up.
    def open_stream
      open_stream_head
      chunk(": open\n\n")
      hang
      socket.close
    end

    def open_stream_head
      @streaming = true
      socket.write("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
    end

    def streaming?
      @streaming
    end

    def chunk(text)
      socket.write("#{text.bytesize.to_s(16)}\r\n#{text}\r\n")
    end

    # Tells of an event on that stream.
    def tell(type, key = "k", id: 1, fencing_token: 7, watchers: 1)
      data = type == "reset" ? {} : { key: key, fencing_token: fencing_token, at: "2026-12-01T00:00:00.123Z", watchers: watchers }
      chunk("event: #{type}\nid: #{id}\ndata: #{JSON.generate(data)}\n\n")
    rescue IOError, SystemCallError
      nil # the client has hung up meanwhile
    end

    # Ends the connection with a reset.
    def reset
      socket.setsockopt(Socket::SOL_SOCKET, Socket::SO_LINGER, [1, 0].pack("ii"))
      socket.close
    end

    # Waits until the client hangs up.
    def hang
      socket.read(1)
    end

    # Grants, releases, and says that every key is free.
    def be_good
      case operation
      when "acquire", "renew" then grant
      when "renew_many" then grant_each
      when "get" then answer(200, { held: false })
      when "watch" then open_stream
      else answer(204)
      end
    end
  end

  def self.open(*arguments, **options, &script)
    new(*arguments, **options, &script)
  end

  attr_reader :port, :requests

  # @param tls [OpenSSL::SSL::SSLContext, nil]
  def initialize(tls: nil, &script)
    @tls = tls
    @script = script || :be_good.to_proc
    @listener = TCPServer.new("127.0.0.1", 0)
    @port = @listener.addr[1]
    @requests = []
    @mutex = Mutex.new
    @connections = 0
    @open = []
    @acceptor = Thread.new { accept }
  end

  def url
    "#{@tls ? "https" : "http"}://127.0.0.1:#{@port}"
  end

  def operations
    @requests.map(&:operation)
  end

  # The event streams that are open on this side.
  def streams
    @mutex.synchronize { @requests.select { |request| request.streaming? && !request.socket.closed? } }
  end

  # How many connections are open on this side.
  def open_connections
    @mutex.synchronize { @open.size }
  end

  def connections
    @connections
  end

  def close
    @acceptor.kill.join
    @listener.close
    @mutex.synchronize { @open.dup }.each { |thread, _socket| thread.kill.join }
  end

  private

  def accept
    loop do
      socket = @listener.accept
      number = @connections += 1
      Thread.new { serve(socket, number) }
    end
  end

  def serve(socket, connection)
    socket = OpenSSL::SSL::SSLSocket.new(socket, @tls).tap { |tls| [tls.sync_close = true, tls.accept] } if @tls
    @mutex.synchronize { @open << [Thread.current, socket] }
    while (request = read(socket, connection))
      @script.call(request)
      break if socket.closed?
    end
  rescue IOError, SystemCallError, OpenSSL::SSL::SSLError
    nil # the client hung up
  ensure
    socket.close unless socket.closed?
    @mutex.synchronize { @open.delete_if { |thread, _socket| thread == Thread.current } }
  end

  def read(socket, connection)
    line = socket.gets("\r\n") or return
    http_method, path, = line.split
    headers = {}
    while (line = socket.gets("\r\n")) && line != "\r\n"
      name, value = line.chomp.split(": ", 2)
      headers[name.downcase] = value
    end
    body = socket.read(headers.fetch("content-length", 0).to_i)
    @mutex.synchronize do
      request = Request.new(socket, @requests.size + 1, connection, http_method, path, headers, body)
      @requests << request
      request
    end
  end
end
