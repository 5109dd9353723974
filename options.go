package coordination

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kversion"
)

// A BrokerOption configures [NewBrokerTransport].
type BrokerOption interface{ applyBroker(*brokerConfig) }

// An ElectorOption configures [NewElector].
type ElectorOption interface{ applyElector(*electorConfig) }

// An Option serves [NewBrokerTransport] and [NewElector] alike.
type Option interface {
	BrokerOption
	ElectorOption
}

type brokerOption func(*brokerConfig)

func (o brokerOption) applyBroker(c *brokerConfig) { o(c) }

type electorOption func(*electorConfig)

func (o electorOption) applyElector(c *electorConfig) { o(c) }

type loggerOption struct{ logger *slog.Logger }

func (o loggerOption) applyBroker(c *brokerConfig)   { c.logger = o.logger }
func (o loggerOption) applyElector(c *electorConfig) { c.logger = o.logger }

// WithLogger sets where events are logged: elections and losses at Info, faults
// that are being retried at Warn, and what needs a human at Error. The default
// is [slog.Default]. Secrets are never logged.
func WithLogger(logger *slog.Logger) Option { return loggerOption{logger} }

type brokerConfig struct {
	clientOptions     []kgo.Opt
	topic             string
	createTopic       bool
	partitions        int32
	replication       int16
	requestTimeout    time.Duration
	fetchMaxWait      time.Duration
	fetchPartitionMax int32
	clientID          string
	logger            *slog.Logger
}

func defaultBrokerConfig() brokerConfig {
	return brokerConfig{
		topic:             StateTopic,
		createTopic:       true,
		partitions:        16,
		replication:       3,
		requestTimeout:    30 * time.Second,
		fetchMaxWait:      500 * time.Millisecond,
		fetchPartitionMax: 1 << 20,
		clientID:          "krabka-coordination",
		logger:            slog.Default(),
	}
}

// WithClientOptions adds franz-go options to every client of the transport: TLS,
// SASL, dialers, hooks. They are applied before the library's own. Options that
// would break a promise (MaxVersions, TransactionalID, RecordDeliveryTimeout,
// RecordRetries, AllowIdempotentProduceCancellation, DisableIdempotentWrite,
// ManualFlushing), and those that consume, are refused with [ErrInvalidConfig].
func WithClientOptions(opts ...kgo.Opt) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.clientOptions = append(c.clientOptions, opts...) })
}

// WithTopic sets the name of the state topic. The default is [StateTopic]; all
// members of a role must agree on it.
func WithTopic(topic string) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.topic = topic })
}

// WithTopicCreation sets whether a member creates the state topic where it is
// missing. The default is true. Observers never create it.
func WithTopicCreation(create bool) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.createTopic = create })
}

// WithPartitions sets the number of partitions of a state topic that is created
// here. The default is 16. A topic that exists is used as it is.
func WithPartitions(partitions int32) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.partitions = partitions })
}

// WithReplication sets the replication factor of a state topic that is created
// here. The default is 3; a cluster of one broker needs 1.
func WithReplication(replication int16) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.replication = replication })
}

// WithRequestTimeout bounds how long one request may take, its retries included.
// The default is 30 s.
func WithRequestTimeout(timeout time.Duration) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.requestTimeout = timeout })
}

// WithFetchMaxWait sets how long a broker holds a fetch when there is nothing
// new. The default is 500 ms. It does not delay what is new.
func WithFetchMaxWait(wait time.Duration) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.fetchMaxWait = wait })
}

// WithFetchPartitionMax sets how many bytes of one partition a fetch returns at
// most. The default is 1 MiB.
func WithFetchPartitionMax(bytes int32) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.fetchPartitionMax = bytes })
}

// WithClientID sets the client id that brokers see in requests and quotas. The
// default is "krabka-coordination".
func WithClientID(id string) BrokerOption {
	return brokerOption(func(c *brokerConfig) { c.clientID = id })
}

func (c brokerConfig) validate(brokers []string) error {
	switch {
	case len(brokers) == 0:
		return invalidConfig("no broker address: pass at least one host:port")
	case !legalTopic(c.topic):
		return invalidConfig("WithTopic(%.260q): use 1 to 249 letters, digits, dots, underscores and dashes", c.topic)
	case c.partitions <= 0:
		return invalidConfig("WithPartitions(%d): use at least 1", c.partitions)
	case c.replication <= 0:
		return invalidConfig("WithReplication(%d): use at least 1", c.replication)
	case c.requestTimeout < 100*time.Millisecond:
		return invalidConfig("WithRequestTimeout(%s): use at least 100ms", c.requestTimeout)
	case c.requestTimeout > time.Hour:
		return invalidConfig("WithRequestTimeout(%s): use at most an hour", c.requestTimeout)
	case c.fetchMaxWait < 10*time.Millisecond || c.fetchMaxWait > c.requestTimeout:
		return invalidConfig("WithFetchMaxWait(%s): use between 10ms and the request timeout of %s", c.fetchMaxWait, c.requestTimeout)
	case c.fetchPartitionMax < 1024:
		return invalidConfig("WithFetchPartitionMax(%d): use at least 1024 bytes", c.fetchPartitionMax)
	case c.clientID == "":
		return invalidConfig("WithClientID: the client id is empty: leave the option out for the default")
	case c.logger == nil:
		return invalidConfig("WithLogger: the logger is nil: leave the option out for slog.Default()")
	}
	for _, broker := range brokers {
		host, port, err := net.SplitHostPort(broker)
		if _, invalid := strconv.ParseUint(port, 10, 16); err != nil || invalid != nil || host == "" || port == "0" {
			return invalidConfig("broker address %q: use host:port, and a string for each broker", broker)
		}
	}
	return checkUserOptions("WithClientOptions", c.clientOptions)
}

// legalTopic is Kafka's rule.
func legalTopic(name string) bool {
	for _, r := range name {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		if !letter && !(r >= '0' && r <= '9') && !strings.ContainsRune("._-", r) {
			return false
		}
	}
	return len(name) >= 1 && len(name) <= 249 && name != "." && name != ".."
}

type electorConfig struct {
	lease              LeaseConfig
	stopMargin         time.Duration // 0: a tenth of the lease
	drainTimeout       time.Duration // 0: one lease
	transactionTimeout time.Duration // 0: see defaultTransactionTimeout
	maxExtent          time.Duration
	restartReclaim     bool
	pruning            bool
	clock              Clock
	producerOptions    []kgo.Opt
	maxBuffered        int // bytes
	logger             *slog.Logger
}

func defaultElectorConfig() electorConfig {
	return electorConfig{
		lease:     DefaultLeaseConfig(),
		maxExtent: defaultMaxExtent,
		pruning:   true,
		clock:     SystemClock{},

		maxBuffered: 64 << 20,
		logger:      slog.Default(),
	}
}

// WithLease sets the lease, its renew interval and the challenge stagger. The
// default is [DefaultLeaseConfig]. Members of one role should agree on it.
func WithLease(config LeaseConfig) ElectorOption {
	return electorOption(func(c *electorConfig) { c.lease = config })
}

// WithStopMargin sets how long before the end of its lease a leader that cannot
// renew stops leading, so that work outside Kafka ends before a standby may
// challenge. The default is a tenth of the lease. It should be at least twice the
// time of a commit.
func WithStopMargin(margin time.Duration) ElectorOption {
	return electorOption(func(c *electorConfig) { c.stopMargin = margin })
}

// WithDrainTimeout sets how long [Elector.Run] keeps renewing for a function
// whose context has ended. The default is one lease.
func WithDrainTimeout(timeout time.Duration) ElectorOption {
	return electorOption(func(c *electorConfig) { c.drainTimeout = timeout })
}

// WithTransactionTimeout sets after what time the coordinator aborts a
// transaction that a leader left open. The default is one renew interval, but at least
// 10 s and at most a minute. Until then an open transaction of a dead leader that
// nobody succeeds hides newer records of other roles from their members; a successor
// aborts it at once.
//
// It is no way to a quicker failover. The coordinator also gives its own log no
// longer than this to replicate each change of a transaction; where that takes
// longer, it waits 30 s before it tries again, and the role stands still meanwhile.
func WithTransactionTimeout(timeout time.Duration) ElectorOption {
	return electorOption(func(c *electorConfig) { c.transactionTimeout = timeout })
}

// WithMaxExtent caps how long a lease found in the log is respected, by its own
// word. The default is 15 minutes; it is never less than the member's own lease.
func WithMaxExtent(extent time.Duration) ElectorOption {
	return electorOption(func(c *electorConfig) { c.maxExtent = extent })
}

// WithPruning sets whether a new leader removes the registrations of members
// that must be dead. The default is true. Turn it off in a fleet with members of
// another implementation that never register a second time.
func WithPruning(prune bool) ElectorOption {
	return electorOption(func(c *electorConfig) { c.pruning = prune })
}

// WithRestartReclaim lets a member that starts and finds its own lease alive take
// the role back at once, instead of waiting for the rest of that lease behind the
// standbys. The default is false. It is for identities that outlive a process,
// such as those of a StatefulSet, and works once per process.
func WithRestartReclaim() ElectorOption {
	return electorOption(func(c *electorConfig) { c.restartReclaim = true })
}

// WithClock sets the wall clock whose instants are written into records, for
// other implementations and for people. The default is [SystemClock]. No decision
// of this library depends on it: timers and leases run on the monotonic clock.
func WithClock(clock Clock) ElectorOption {
	return electorOption(func(c *electorConfig) { c.clock = clock })
}

// WithProducerOptions adds franz-go options to the client that writes under a
// leadership: compression, partitioner, batch size. The rules of
// [WithClientOptions] hold. The state topic is always placed by hand.
func WithProducerOptions(opts ...kgo.Opt) ElectorOption {
	return electorOption(func(c *electorConfig) { c.producerOptions = append(c.producerOptions, opts...) })
}

// WithMaxBuffered sets how many bytes of records a leadership holds that are not
// committed yet; calls wait while it is full. The default is 64 MiB. A call that is
// larger is taken when nothing else is there.
func WithMaxBuffered(bytes int) ElectorOption {
	return electorOption(func(c *electorConfig) { c.maxBuffered = bytes })
}

// defaultTransactionTimeout is one renew interval, within reason: measured on Kafka
// 4.3.1 with three brokers, a timeout of 333 ms made the coordinator's own appends time
// out (REQUEST_TIMED_OUT), which it retries only after 30 s; and its scan for
// transactions that are over comes every 10 s, so that less gains nothing.
func defaultTransactionTimeout(lease LeaseConfig) time.Duration {
	return min(max(lease.RenewInterval(), 10*time.Second), time.Minute)
}

// resolve fills in the defaults that depend on the lease, then validates.
func (c electorConfig) resolve() (electorConfig, error) {
	if c.lease.Duration() <= 0 {
		return c, invalidConfig("WithLease: the lease configuration is the zero value: make one with NewLeaseConfig or LeaseConfigFor")
	}
	if c.stopMargin == 0 {
		c.stopMargin = c.lease.Duration() / 10
	}
	if c.drainTimeout == 0 {
		c.drainTimeout = c.lease.Duration()
	}
	if c.transactionTimeout == 0 {
		c.transactionTimeout = defaultTransactionTimeout(c.lease)
	}
	switch slack := c.lease.Duration() - c.lease.RenewInterval(); {
	case c.stopMargin < 0 || c.stopMargin >= slack:
		return c, invalidConfig("WithStopMargin(%s): use less than %s, what is left of the lease after a renew interval", c.stopMargin, slack)
	case c.drainTimeout < 0:
		return c, invalidConfig("WithDrainTimeout(%s): use a positive duration", c.drainTimeout)
	case c.transactionTimeout < time.Millisecond:
		return c, invalidConfig("WithTransactionTimeout(%s): use at least 1ms", c.transactionTimeout)
	case c.transactionTimeout > math.MaxInt32*time.Millisecond:
		return c, invalidConfig("WithTransactionTimeout(%s): use at most what brokers allow, transaction.max.timeout.ms, which is 15 minutes unless set", c.transactionTimeout)
	case c.maxBuffered <= 0:
		return c, invalidConfig("WithMaxBuffered(%d): use a positive number of bytes", c.maxBuffered)
	case c.maxExtent <= 0:
		return c, invalidConfig("WithMaxExtent(%s): use a positive duration", c.maxExtent)
	case c.clock == nil:
		return c, invalidConfig("WithClock: the clock is nil: leave the option out for SystemClock")
	case c.logger == nil:
		return c, invalidConfig("WithLogger: the logger is nil: leave the option out for slog.Default()")
	}
	return c, checkUserOptions("WithProducerOptions", c.producerOptions)
}

// stallTimeout is half of what is left of a lease when a renewal is due: the other
// half is for the abort, and for the renewal.
func (c electorConfig) stallTimeout() time.Duration {
	return (c.lease.Duration() - c.stopMargin - c.lease.RenewInterval()) / 2
}

// checkUserOptions refuses options that break a promise. It reads them back from
// a client that never dials.
func checkUserOptions(option string, opts []kgo.Opt) error {
	for i, opt := range opts {
		if opt == nil {
			return invalidConfig("%s: option %d is nil", option, i)
		}
	}
	if len(opts) == 0 {
		return nil
	}
	client, err := kgo.NewClient(append([]kgo.Opt{kgo.DisableClientMetrics()}, opts...)...)
	if err != nil {
		return invalidConfig("%s: %v", option, err)
	}
	defer client.Close()
	bare, err := kgo.NewClient(kgo.DisableClientMetrics())
	if err != nil {
		return fmt.Errorf("%s: %w", option, err)
	}
	defer bare.Close()

	refused := []struct {
		name   string
		broken bool
	}{
		{"MaxVersions", optionChanged(client, bare, kgo.MaxVersions)},
		{"TransactionalID", optionChanged(client, bare, kgo.TransactionalID)},
		{"RecordDeliveryTimeout", optionChanged(client, bare, kgo.RecordDeliveryTimeout)},
		{"RecordRetries", optionChanged(client, bare, kgo.RecordRetries)},
		{"AllowIdempotentProduceCancellation", optionChanged(client, bare, kgo.AllowIdempotentProduceCancellation)},
		{"DisableIdempotentWrite", optionChanged(client, bare, kgo.DisableIdempotentWrite)},
		{"ManualFlushing", optionChanged(client, bare, kgo.ManualFlushing)},
		{"ConsumeTopics", optionChanged(client, bare, kgo.ConsumeTopics)},
		{"ConsumePartitions", optionChanged(client, bare, kgo.ConsumePartitions)},
		{"ConsumerGroup", optionChanged(client, bare, kgo.ConsumerGroup)},
	}
	for _, r := range refused {
		if r.broken {
			return invalidConfig("%s: kgo.%s breaks a promise of this library: leave it out", option, r.name)
		}
	}
	return nil
}

// optionChanged reports whether two clients differ in the value of an option.
func optionChanged(a, b *kgo.Client, option any) bool {
	x, y := a.OptValue(option), b.OptValue(option)
	versions, ok := x.(*kversion.Versions)
	if others, also := y.(*kversion.Versions); ok && also {
		return versions == nil || others == nil || !versions.Equal(others)
	}
	return fmt.Sprint(x) != fmt.Sprint(y)
}

// kgoLogger passes franz-go's own log lines on, all of them at Debug: what they
// lead to is logged by the library in its own words.
type kgoLogger struct{ logger *slog.Logger }

func (l kgoLogger) Level() kgo.LogLevel {
	if l.logger.Enabled(context.Background(), slog.LevelDebug) {
		return kgo.LogLevelInfo
	}
	return kgo.LogLevelNone
}

func (l kgoLogger) Log(_ kgo.LogLevel, msg string, keyvals ...any) {
	l.logger.Debug("kafka client: "+msg, keyvals...)
}
