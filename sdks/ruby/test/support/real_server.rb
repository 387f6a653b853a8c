# frozen_string_literal: true

# The reference server, one process for all tests: `volcano-server dev` on a free port, nothing on disk.
module RealServer
  ROOT = File.expand_path("../../../..", __dir__)
  COMMAND = [
    *ENV["VOLCANO_SERVER"], *ENV.fetch("PATH").split(File::PATH_SEPARATOR).map { |directory| File.join(directory, "volcano-server") },
    File.join(ROOT, ".nox/environment/bin/volcano-server"), File.join(ROOT, ".venv/bin/volcano-server")
  ].find { |path| File.executable?(path) }

  def self.facts
    @facts ||= begin
      raise "the tests need volcano-server: ./dev test ruby, or put it on PATH" unless COMMAND

      server = IO.popen([COMMAND, "dev", "--port", "0", "--ephemeral", "--json", "--quota", "0"], err: File::NULL)
      pid = Process.pid
      Minitest.after_run { stop(server) if Process.pid == pid }
      JSON.parse(server.gets || raise("volcano-server did not start"))
    end
  end

  def self.stop(server)
    Process.kill(:TERM, server.pid)
    server.close
  end

  def self.url
    facts.fetch("url")
  end

  def self.service_key
    facts.fetch("service_key")
  end

  # A client of it, and a key that no other test uses.
  def self.client(**settings)
    Volcano::Client.new(api_url: url, service_key: service_key, proxy: nil, **settings)
  end

  def self.key
    "test:#{SecureRandom.hex(6)}"
  end
end
