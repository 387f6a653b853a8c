# frozen_string_literal: true

require "json"
require "time"
require "uri"
require "volcano/operations"

module Volcano
  # Something that became of a lock, as `client.locks.watch` tells it. Frozen.
  #
  # It is a hint: by the time you hear of it, the lock may be another's again. Only an acquire decides.
  class LockEvent
    # @return [Symbol] :acquired, :released, :force_released, :lapsed (it became free through expiry), or
    #   :reset: events may be missing from here on, read again; everything else is nil then
    attr_reader :type
    # @return [String, nil] the lock's name
    attr_reader :key
    # @return [Integer, nil] that of the lease which began or ended
    attr_reader :fencing_token
    # @return [Time, nil] when, by the server's clock, in UTC
    attr_reader :at
    # @return [Integer, nil] how many streams of that server asked for this very key
    attr_reader :watchers

    def initialize(type:, key: nil, fencing_token: nil, at: nil, watchers: nil)
      @type = type
      @key = key
      @fencing_token = fencing_token
      @at = at
      @watchers = watchers
      freeze
    end

    def ==(other)
      other.is_a?(LockEvent) && to_h == other.to_h
    end
    alias eql? ==

    def hash
      to_h.hash
    end

    def to_h
      { type: @type, key: @key, fencing_token: @fencing_token, at: @at, watchers: @watchers }
    end

    # For pattern matching: `in { type: :released, key: }`.
    def deconstruct_keys(_names)
      to_h
    end

    def inspect
      "#<#{self.class} #{@type}#{" key=#{@key.inspect} fencing_token=#{@fencing_token} at=#{@at.inspect} watchers=#{@watchers}" if @key}>"
    end
    alias to_s inspect
  end

  # What a stream of events is asked for, and what its bytes say. Pure.
  #
  #   bytes ──> Parser ──> Message (type, data, id) ──> Events.read ──> LockEvent
  #
  # The rules: docs/semantics.md#events; as data, the same in every SDK: conformance/tables/event_stream.json
  # and event_filters.json.
  # @api private
  module Events
    TYPES = %i[acquired released force_released lapsed reset].to_h { |type| [type.name, type] }.freeze
    RESET = LockEvent.new(type: :reset)
    # After these a key is free, or may be.
    FREEING = %i[released force_released lapsed reset].freeze

    # One event as it was on the wire.
    Message = Struct.new(:type, :data, :id, keyword_init: true)

    # What the message says of a lock; nil for one that is for other ears. What cannot be understood is
    # answered as a gap is: read again.
    def self.read(message)
      type = TYPES[message.type]
      return if type.nil?

      fields = JSON.parse(message.data, symbolize_names: true) unless type == :reset
      case fields
      in { key: String => key, fencing_token: Integer => fencing_token, at: String => at, watchers: Integer => watchers }
        LockEvent.new(type: type, key: key.freeze, fencing_token: fencing_token, at: Time.xmlschema(at).getutc.freeze, watchers: watchers)
      else RESET
      end
    rescue JSON::JSONError, EncodingError, ArgumentError
      RESET
    end

    # The keys and the prefixes that a stream tells of. Frozen.
    class Filters
      # So many the server takes.
      MOST = 64

      # Each in the order of its bytes.
      attr_reader :keys, :prefixes

      # Those of a stream for all that wait for these keys. More than 64 become their shared prefixes, as long as 64 of
      # them are enough.
      def self.of(keys)
        keys = keys.uniq
        return new(keys) if keys.size <= MOST

        too_long = (1..keys.map(&:size).max).bsearch { |length| keys.uniq { |key| key[0, length] }.size > MOST }
        new([], keys.map { |key| key[0, too_long - 1] }.uniq)
      end

      # Those of a `watch`, or ArgumentError.
      def self.checked(key, prefix)
        keys, prefixes = { "key" => key, "prefix" => prefix }.map do |name, given|
          Array(given.nil? ? [] : given).map { |one| Operations.checked_key(one, name) }.uniq
        end
        return new(keys, prefixes) if (keys.size + prefixes.size).between?(1, MOST)

        raise ArgumentError, "key and prefix must be 1 to #{MOST} together; got #{keys.size + prefixes.size}"
      end

      def initialize(keys, prefixes = [])
        @keys = keys.sort.freeze
        @prefixes = prefixes.sort.freeze
        freeze
      end

      # Does a stream with these filters tell of that key?
      def cover?(key)
        @keys.include?(key) || @prefixes.any? { |prefix| key.start_with?(prefix) }
      end

      # As the query of a URL.
      def query
        URI.encode_www_form([*@keys.map { |key| ["key", key] }, *@prefixes.map { |prefix| ["prefix", prefix] }])
      end
    end

    # The "event stream interpretation" of the HTML standard.
    class Parser
      LINE_END = /[\r\n]/n
      MARK = "\xEF\xBB\xBF".b.freeze
      private_constant :LINE_END, :MARK

      # Of the event that ended last; what a reconnect sends as Last-Event-ID. Empty: none.
      attr_reader :last_id

      def initialize(last_id = "")
        @last_id = @id = last_id
        @rest = String.new # the line that has not ended
        @at_start = true
        @after_cr = false
        begin_event
      end

      # The messages that end in these further bytes.
      def feed(bytes)
        @rest << bytes
        messages = []
        while (line = next_line)
          messages << take(line)
        end
        messages.compact
      end

      # How many bytes it keeps of what has not ended.
      def kept
        @rest.bytesize + @data.sum(&:bytesize)
      end

      private

      def next_line
        return unless started?

        @rest.slice!(0) if @after_cr && @rest.start_with?("\n")
        @after_cr = false unless @rest.empty?
        length = @rest.index(LINE_END) or return

        line = @rest.slice!(0..length)
        @after_cr = line.end_with?("\r")
        line.chop.force_encoding(Encoding::UTF_8).scrub
      end

      # Is it past the byte order mark, if there is one?
      def started?
        return true unless @at_start
        return false if @rest.bytesize < MARK.bytesize && MARK.start_with?(@rest)

        @rest.slice!(0, MARK.bytesize) if @rest.start_with?(MARK)
        @at_start = false
        true
      end

      # A message where the line ends one.
      def take(line)
        return end_event if line.empty?

        name, value = line.split(":", 2)
        value = value.to_s.delete_prefix(" ")
        case name
        when "event" then @type = value
        when "data" then @data << value
        when "id" then @id = value unless value.include?("\0")
        end
        nil
      end

      def end_event
        @last_id = @id
        message = Message.new(type: @type.empty? ? "message" : @type, data: @data.join("\n"), id: @last_id) unless @data.empty?
        begin_event
        message
      end

      def begin_event
        @type = ""
        @data = []
      end
    end
  end
end
