# frozen_string_literal: true

module Volcano
  # What can go wrong, as a tree.
  #
  #   Volcano::Error
  #   ├── ValidationError        400: the server found the request wrong
  #   ├── AuthenticationError    401, or no service key was configured
  #   │   └── PermissionDeniedError  403
  #   ├── NotFoundError          404
  #   ├── ConflictError          409 of a direct call; from `with_lock`: somebody else holds the lock
  #   ├── LockLostError          from a guard or `with_lock`: we held the lock and may no longer act
  #   ├── RateLimitedError       429; `retry_after` says when to come back
  #   ├── ServerError            5xx, or an answer that cannot be understood
  #   └── TransportError         no answer arrived: whether the server acted is not known
  #
  # `ConflictError` ("somebody else has it") and `LockLostError` ("I had it and lost it") are apart on
  # purpose. Arguments that cannot be right raise ArgumentError before anything is sent.
  # The same names in every SDK: conformance/tables/error_names.json.
  class Error < StandardError
    # @return [Integer, nil] the HTTP status of the answer
    attr_reader :status
    # @return [String, nil] the server's word for it, such as "lock_held"
    attr_reader :code
    # @return [Float, nil] seconds after which the server wants to be asked again
    attr_reader :retry_after
    # @return [String, nil] what the server logged the operation under
    attr_reader :request_id

    def initialize(message = nil, status: nil, code: nil, retry_after: nil, request_id: nil)
      super(message)
      @status = status
      @code = code
      @retry_after = retry_after
      @request_id = request_id
    end

    # The class of an error answer.
    # @api private
    def self.from_status(status)
      BY_STATUS.fetch(status) { status >= 500 ? ServerError : Error }
    end

    # The error with its cause. Ruby sets a cause in `raise` alone, and takes `$!` when none is named:
    # an error of ours never has a stranger for a cause.
    # @api private
    def self.with_cause(error, cause)
      raise error, cause: cause
    rescue error.class => raised
      raised.set_backtrace(nil)
      raised
    end

    # Let `companion` travel with `error`: at the end of its chain of causes, where loggers and error
    # trackers show it. The user's own error is never masked (docs/semantics.md#exit).
    # @api private
    def self.put_beside(error, companion)
      travelling = chain(error)
      return if travelling.any? { |one| chain(companion).any? { |other| one.equal?(other) } }

      begin
        raise travelling.last, cause: companion
      rescue travelling.last.class
        nil # raised only because nothing else sets a cause
      end
    end

    # The error, then its cause, and so on.
    # @api private
    def self.chain(error)
      errors = [error]
      while (cause = errors.last.cause) && errors.none? { |one| one.equal?(cause) }
        errors << cause
      end
      errors
    end

    # The server found a key, TTL, token or request id wrong.
    class ValidationError < Error; end

    # No service key, or one that the server does not know (any more).
    class AuthenticationError < Error; end

    # The credential is good, but may not manage locks.
    class PermissionDeniedError < AuthenticationError; end

    # The server has no such route: is `api_url` right?
    class NotFoundError < Error; end

    # Somebody else holds the lock, or this lock token does not.
    class ConflictError < Error; end

    # We held the lock and may no longer act. `cause`: what the server or the network last said.
    class LockLostError < Error
      # One loss may be raised in several places; all of them know it by this.
      # @api private
      attr_reader :loss

      def initialize(message = nil, loss: Object.new, **facts)
        super(message, **facts)
        @loss = loss
      end

      # The same loss, to be raised once more with the backtrace of that place.
      # @api private
      def again
        copy = self.class.new(message, loss: @loss, status: status, code: code, retry_after: retry_after, request_id: request_id)
        Error.with_cause(copy, cause)
      end

      # Does this loss already travel with that error?
      # @api private
      def travels_with?(error)
        Error.chain(error).any? { |one| one.is_a?(LockLostError) && one.loss.equal?(@loss) }
      end
    end

    # The project's quota of this minute is used up.
    class RateLimitedError < Error; end

    # The server failed, or said something that cannot be understood.
    class ServerError < Error; end

    # No answer arrived. The server may or may not have acted.
    class TransportError < Error; end

    BY_STATUS = {
      400 => ValidationError,
      401 => AuthenticationError,
      403 => PermissionDeniedError,
      404 => NotFoundError,
      409 => ConflictError,
      413 => ValidationError,
      429 => RateLimitedError
    }.freeze
    private_constant :BY_STATUS
  end
end
