# frozen_string_literal: true

require "json"
require "time"
require "volcano/errors"
require "volcano/lease"

module Volcano
  # What each call sends and what its answer means. Pure: no I/O, no clock, no randomness.
  #
  # A call that may take more than one try is a *flow*: it says which `Try` to send next and is told each
  # `Answer` or `Failure`, so that at any moment, also when its thread is interrupted, it knows how
  # things stand.
  #
  # One file, in the order in which a call goes through it: arguments, requests, answers, flows.
  #
  #   flow ── next_try ──> transport ── Answer | Failure ──> flow.take ── … until next_try is nil
  # @api private
  module Operations
    TTLS = (5..7_776_000).freeze
    # How long one try of a release on the way out may take, and how long a cancelled acquire may still
    # wait for its answer.
    EXIT_TRY_SECONDS = 2.0

    # So many leases at most are renewed by one request.
    MANY = 500

    # The statuses of the refusals that a lease may meet among others.
    STATUSES = {
      "invalid_request" => 400, "authentication_required" => 401, "invalid_credentials" => 401, "permission_denied" => 403,
      "lock_held" => 409, "lock_ownership_lost" => 409, "lock_rate_limited" => 429, "lock_service_unavailable" => 503
    }.freeze

    KEY = /\A[A-Za-z0-9][A-Za-z0-9._:-]{0,127}\z/
    UUID = /\A\h{8}-\h{4}-\h{4}-\h{4}-\h{12}\z/
    private_constant :STATUSES, :KEY, :UUID

    module_function

    # --- arguments ---------------------------------------------------------------------------------

    # The key (or what `name` says), or ArgumentError with the grammar. Bytes are looked at, whatever the string's encoding says.
    def checked_key(key, name = "key")
      return key.b.force_encoding(Encoding::UTF_8).freeze if key.is_a?(String) && KEY.match?(key.b)

      raise ArgumentError, "#{name} must be 1 to 128 characters, a letter or digit followed by letters, digits, " \
                           "'.', '_', ':' or '-' (ASCII); got #{shown(key)}"
    end

    # The TTL in whole seconds, or ArgumentError.
    def checked_ttl(ttl)
      return ttl if ttl.is_a?(Integer) && TTLS.cover?(ttl)

      raise ArgumentError, "ttl must be a whole number of seconds from #{TTLS.begin} to #{TTLS.end} (90 days); got #{shown(ttl)}"
    end

    # The lock token in its canonical form, or ArgumentError that does not show it.
    def checked_token(token)
      checked_uuid(token) { "token must be a UUID; got a #{token.class} that is none" }
    end

    # The request id in its canonical form, or ArgumentError.
    def checked_request_id(request_id)
      checked_uuid(request_id) { "request_id must be a UUID; got #{shown(request_id)}" }
    end

    # The lease, or ArgumentError: it must be a lease of this very key.
    def checked_lease(key, lease)
      unless lease.is_a?(LockLease)
        raise ArgumentError, "lease must be a Volcano::LockLease, as acquire returns it; got a #{lease.class}"
      end
      raise ArgumentError, "lease is a lease of #{lease.key.inspect}, not of #{key.inspect}" unless lease.key == key

      lease
    end

    def checked_uuid(value)
      return value.b.downcase.force_encoding(Encoding::UTF_8).freeze if value.is_a?(String) && UUID.match?(value.b)

      raise ArgumentError, yield
    end

    def shown(value)
      text = value.inspect
      text.length <= 80 ? text : "#{text[0, 77]}..."
    end

    # --- requests ----------------------------------------------------------------------------------

    # One operation, fixed before the first send and identical on every try of it.
    # `path` is relative to the API's URL; `headers` carry the credential and the lock token.
    Request = Struct.new(:operation, :http_method, :path, :headers, :body, keyword_init: true) do
      def initialize(**)
        super
        freeze
      end

      def request_id
        headers.fetch("X-Volcano-Request-Id")
      end

      def inspect
        "#<#{self.class} #{operation} #{path} #{request_id}>"
      end
      alias_method :to_s, :inspect
    end

    def acquire(key, ttl:, token:, request_id:, service_key:)
      lease_request("acquire", "POST", key, headers(service_key, request_id, token), ttl)
    end

    def renew(key, ttl:, token:, request_id:, service_key:)
      lease_request("renew", "PATCH", key, headers(service_key, request_id, token), ttl)
    end

    # Several renewals in one request. `leases`: [[LockLease, ttl], …], MANY at most.
    def renew_many(leases, request_id:, service_key:)
      body = { leases: leases.map { |lease, ttl| { key: lease.key, token: lease.token, ttl_seconds: ttl } } }
      Request.new(
        operation: "renew_many", http_method: "PATCH", path: "/lock-leases", headers: headers(service_key, request_id), body: JSON.generate(body)
      )
    end

    def release(key, token:, request_id:, service_key:)
      lease_request("release", "DELETE", key, headers(service_key, request_id, token))
    end

    def get(key, request_id:, service_key:)
      Request.new(operation: "get", http_method: "GET", path: path(key), headers: headers(service_key, request_id))
    end

    def force_release(key, request_id:, service_key:)
      Request.new(operation: "force_release", http_method: "DELETE", path: path(key), headers: headers(service_key, request_id))
    end

    # A stream of what becomes of the locks that these Filters name. `last_id`: the id of the event behind which it goes on;
    # empty: from now on.
    def watch(filters, last_id:, request_id:, service_key:)
      headers = { **headers(service_key, request_id), "Accept" => "text/event-stream" }
      headers["Last-Event-ID"] = last_id unless last_id.empty?
      Request.new(operation: "watch", http_method: "GET", path: "/lock-events?#{filters.query}", headers: headers.freeze)
    end

    def lease_request(operation, http_method, key, headers, ttl = nil)
      body = ttl && %({"ttl_seconds":#{ttl}})
      Request.new(operation: operation, http_method: http_method, path: "#{path(key)}/lease", headers: headers, body: body)
    end

    # Of all that a key may contain, only `:` is not at home in a path segment.
    def path(key)
      "/locks/#{key.gsub(":", "%3A")}"
    end

    def headers(service_key, request_id, token = nil)
      headers = {
        "Authorization" => "Bearer #{service_key}",
        "Content-Type" => "application/json",
        "X-Volcano-Request-Id" => request_id
      }
      headers["X-Volcano-Lock-Token"] = token if token
      headers.freeze
    end

    # --- answers -----------------------------------------------------------------------------------

    # What the server said. `sent_at`: when this try was sent, on the local clock.
    # `headers` has lower-case names; `body` is text, or what it says where it was part of a larger one.
    Answer = Struct.new(:sent_at, :status, :headers, :body, keyword_init: true)

    # No answer. `reached`: the connection stood, so the server may have acted.
    Failure = Struct.new(:sent_at, :error, :reached, keyword_init: true)

    # What a flow wants sent: this request, given up after `timeout` seconds.
    Try = Struct.new(:request, :timeout, keyword_init: true)

    # A good answer to an acquire or a renewal. `expires_in`: what was left of the lease when the server
    # decided, in seconds, if it says so.
    Grant = Struct.new(:sent_at, :expires_at, :fencing_token, :expires_in, keyword_init: true) do
      def lease(key, token)
        LockLease.new(key: key, token: token, expires_at: expires_at, fencing_token: fencing_token)
      end
    end

    # Read the outcome of an acquire (201) or a renewal (200); any other raises its error.
    def granted(request, outcome)
      expect(request, outcome, request.operation == "acquire" ? 201 : 200)
      fields = json_object(request, outcome)
      Grant.new(
        sent_at: outcome.sent_at,
        expires_at: instant(request, outcome, fields),
        fencing_token: fencing_token(request, outcome, fields),
        expires_in: expires_in(outcome.headers["x-volcano-expires-in"])
      )
    end

    # What the outcome of a renew_many means for each lease, by position: as many outcomes as `keys`, each to be
    # read like that of a renewal; nil when it says nothing of any lease, and each must be renewed by itself.
    def renewed_each(request, keys, outcome)
      return [outcome] * keys.size if outcome.is_a?(Failure)

      case outcome.status
      when 200 then answers(keys, outcome) || [Answer.new(sent_at: outcome.sent_at, status: 200, headers: {})] * keys.size
      when 400, 404, 405, 413 then nil
      when 409 then [Failure.new(sent_at: outcome.sent_at, error: unreadable(request, outcome, "status", status: nil), reached: true)] * keys.size
      else [outcome] * keys.size
      end
    end

    # Does the server lack what was asked for?
    def lacking?(outcome)
      outcome.is_a?(Answer) && [404, 405].include?(outcome.status)
    end

    # Read the outcome of a read.
    def state(request, outcome)
      expect(request, outcome, 200)
      fields = json_object(request, outcome)
      case fields["held"]
      when true
        LockState.new(held: true, expires_at: instant(request, outcome, fields), fencing_token: fencing_token(request, outcome, fields))
      when false
        LockState.new(held: false)
      else
        raise unreadable(request, outcome, "held"), cause: nil
      end
    end

    # Read the outcome of a release or a force release.
    def released(request, outcome)
      expect(request, outcome, 204)
    end

    # Why there is no stream of events.
    def not_opened(request, outcome)
      return outcome.error if outcome.is_a?(Failure)
      return unreadable(request, outcome, "content type") if outcome.status == 200
      return problem(request, outcome) unless lacking?(outcome)

      Error::NotFoundError.new("this server has no events", status: outcome.status, request_id: request.request_id)
    end

    # The error that an answer other than the expected one stands for.
    def problem(request, answer)
      sentence, code = explanation(answer.body)
      Error.from_status(answer.status).new(
        sentence || "#{request.operation} was answered #{answer.status} without an explanation",
        status: answer.status,
        code: code,
        retry_after: retry_after(answer.headers["retry-after"], answer.headers["date"]),
        request_id: request.request_id
      )
    end

    # Seconds that a `Retry-After` header asks for; nil where it says nothing of use.
    # A date counts from the answer's own `Date`: the local wall clock may be wrong.
    def retry_after(value, date = nil)
      text = value&.strip
      return text.to_f if text&.match?(/\A[0-9]{1,18}\z/)
      return if text.nil? || date.nil?

      seconds = Time.httpdate(text) - Time.httpdate(date.strip)
      seconds if seconds >= 0
    rescue ArgumentError
      nil # not a date
    end

    # The answers in one to a renew_many; nil where they are not about these keys.
    def answers(keys, outcome)
      fields = parsed(outcome.body)
      items = fields["leases"] if fields.is_a?(Hash)
      return unless items.is_a?(Array) && items.all?(Hash) && items.map { |item| item["key"] } == keys

      items.map { |item| answer_of(item, outcome.sent_at) }
    rescue JSON::JSONError, EncodingError, TypeError
      nil
    end

    # An unknown code is read as a grant, which it is not: an answer that cannot be understood.
    def answer_of(item, sent_at)
      expires_in, retry_after = item.values_at("expires_in", "retry_after")
      headers = {}
      headers["x-volcano-expires-in"] = format("%.3f", expires_in.floor(3)) if expires_in.is_a?(Numeric)
      headers["retry-after"] = retry_after.to_s if retry_after.is_a?(Integer)
      item = item.except("fencing_token") if item.key?("code")
      Answer.new(sent_at: sent_at, status: STATUSES.fetch(item["code"], 200), headers: headers, body: item)
    end

    def parsed(body)
      body.is_a?(Hash) ? body : JSON.parse(body)
    end

    def expect(request, outcome, status)
      raise outcome.error, cause: outcome.error.cause if outcome.is_a?(Failure)
      raise problem(request, outcome), cause: nil unless outcome.status == status
    end

    def explanation(body)
      fields = parsed(body)
      fields.values_at("error", "code") if fields.is_a?(Hash) && fields.values_at("error", "code").all?(String)
    rescue JSON::JSONError, EncodingError, TypeError
      nil # not from a lock server: a proxy's page says nothing that helps
    end

    def json_object(request, answer)
      fields = parsed(answer.body)
      return fields if fields.is_a?(Hash)

      raise unreadable(request, answer, "body"), cause: nil
    rescue JSON::JSONError, EncodingError, TypeError
      raise unreadable(request, answer, "body"), cause: nil
    end

    def instant(request, answer, fields)
      text = fields["expires_at"]
      # A time without a zone would be read as a local one.
      return Time.xmlschema(text).getutc.freeze if text.is_a?(String) && text.match?(/(Z|[+-]\d\d:\d\d)\z/i)

      raise unreadable(request, answer, "expires_at"), cause: nil
    rescue ArgumentError
      raise unreadable(request, answer, "expires_at"), cause: nil
    end

    def fencing_token(request, answer, fields)
      fencing_token = fields["fencing_token"]
      return fencing_token if fencing_token.is_a?(Integer) && fencing_token.between?(0, (2**53) - 1)

      raise unreadable(request, answer, "fencing_token"), cause: nil
    end

    # An addition of ours, which other servers lack.
    def expires_in(value)
      value.to_f if value&.match?(/\A[0-9]{1,9}(\.[0-9]{1,6})?\z/)
    end

    def unreadable(request, answer, what, status: answer.status)
      Error::ServerError.new(
        "#{request.operation} was answered #{answer.status}, but its #{what} cannot be understood",
        status: status,
        request_id: request.request_id
      )
    end

    private_class_method :checked_uuid, :lease_request, :path, :headers, :answers, :answer_of, :parsed,
                         :expect, :explanation, :json_object, :instant, :fencing_token, :expires_in, :unreadable

    # --- flows -------------------------------------------------------------------------------------

    # How an acquire flow ends with a lease. `first_sent_at`: when its first try was sent.
    Acquired = Struct.new(:grant, :first_sent_at, keyword_init: true)

    # At most two tries: a transport failure or a 503 is retried once, immediately.
    # docs/semantics.md#ambiguous-acquire.
    class AcquireFlow
      # The Acquired, or the error of the last try; both nil until the flow ends.
      attr_reader :acquired, :error

      def initialize(request, ttl:, timeout:)
        @request = request
        @attempt = Try.new(request: request, timeout: [timeout, ttl - 1.0].min)
        @tries = 0
        @again = true
        @unknown = false
      end

      def next_try
        @attempt if @again
      end

      # May the server have granted a lease that nobody here knows of?
      def unknown?
        @unknown
      end

      def take(outcome)
        @tries += 1
        @first_sent_at ||= outcome.sent_at
        @acquired = Acquired.new(grant: Operations.granted(@request, outcome), first_sent_at: @first_sent_at)
        @error = nil
        @again = @unknown = false
      rescue Error => error
        @error = error
        @unknown = unknown_after?(outcome)
        @again = @tries == 1 && (outcome.is_a?(Failure) || outcome.status == 503)
      end

      private

      def unknown_after?(outcome)
        return @unknown || outcome.reached if outcome.is_a?(Failure)
        return false if outcome.status == 409

        @unknown || @error.is_a?(Error::ServerError)
      end
    end

    # A release on the way out: bounded tries, the second only after no answer or a 5xx.
    # docs/semantics.md#exit. A 409 to a second try counts as released: the first one did it.
    class ReleaseFlow
      # Why it failed; nil until then, and when it did not.
      attr_reader :error

      def initialize(request, tries:)
        @request = request
        @attempt = Try.new(request: request, timeout: EXIT_TRY_SECONDS)
        @left = tries
        @first = true
        @released = false
      end

      def next_try
        @attempt if @left.positive?
      end

      def released?
        @released
      end

      def take(outcome)
        @left -= 1
        Operations.released(@request, outcome)
        succeed
      rescue Error::ConflictError => error
        @first ? fail_with(error) : succeed
      rescue Error::TransportError, Error::ServerError => error
        @error = error
      rescue Error => error
        fail_with(error)
      ensure
        @first = false
      end

      private

      def succeed
        @released = true
        @error = nil
        @left = 0
      end

      def fail_with(error)
        @error = error
        @left = 0
      end
    end

  end
end
