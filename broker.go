package coordination

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// dialBudget bounds how long [NewBrokerTransport] tries to reach a broker.
const dialBudget = 4 * time.Second

// BrokerTransport is the [Transport] over a Kafka cluster. One serves any number
// of roles and members in a process: all share one reader, whatever their number,
// and only a member that leads or is about to holds a client of its own.
//
// It is safe for concurrent use.
type BrokerTransport struct {
	config brokerConfig
	base   []kgo.Opt
	admin  *kgo.Client // requests and registrations; never fetches by subscription
	kadm   *kadm.Client

	starting chan struct{} // held while the topic is looked up and the reader started

	mu      sync.Mutex // guards what follows
	reader  *reader
	members int           // open subscriptions of members
	empty   chan struct{} // closed while there are none

	drainOnce sync.Once
	draining  chan struct{}
	closeOnce sync.Once
	closed    chan struct{}
	ended     chan struct{} // closed when Close has finished
}

var _ Transport = (*BrokerTransport)(nil)

// NewBrokerTransport connects to a cluster: it dials one of the brokers, each a
// host:port, and authenticates. The state topic and the reader come with the first
// role that is followed.
//
// It blocks until a broker answered, for at most 4 s or until ctx ends; ctx means
// nothing after that. It fails with an error that wraps [ErrInvalidConfig] for
// options that cannot work, and with the last dial's error if no broker can be
// reached.
func NewBrokerTransport(ctx context.Context, brokers []string, opts ...BrokerOption) (*BrokerTransport, error) {
	config := defaultBrokerConfig()
	for i, opt := range opts {
		if opt == nil {
			return nil, invalidConfig("NewBrokerTransport: option %d is nil", i)
		}
		opt.applyBroker(&config)
	}
	if err := config.validate(brokers); err != nil {
		return nil, err
	}
	t := &BrokerTransport{
		config:   config,
		starting: make(chan struct{}, 1),
		draining: make(chan struct{}),
		closed:   make(chan struct{}),
		ended:    make(chan struct{}),
		empty:    make(chan struct{}),
	}
	close(t.empty)
	t.base = []kgo.Opt{
		kgo.SeedBrokers(brokers...),
		kgo.ClientID(config.clientID),
		kgo.WithLogger(kgoLogger{config.logger}),
		kgo.DisableClientMetrics(),
		kgo.DialTimeout(min(config.requestTimeout, dialBudget)),
		kgo.RequestTimeoutOverhead(min(config.requestTimeout, 10*time.Second)),
		kgo.RetryTimeout(config.requestTimeout),
		kgo.RetryBackoffFn(retryBackoff),
		// What a standby asks at its turn must not wait for a connection.
		kgo.ConnIdleTimeout(5 * time.Minute),
		// A leader that moved is looked for at once, not after kgo's 5 s.
		kgo.MetadataMinAge(100 * time.Millisecond),
	}
	admin, err := kgo.NewClient(t.options(
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerLinger(0),
		kgo.RecordDeliveryTimeout(config.requestTimeout),
	)...)
	if err != nil {
		return nil, invalidConfig("kafka client: %v", err)
	}
	t.admin = admin
	t.kadm = kadm.NewClient(admin)

	dial, cancel := context.WithTimeout(ctx, dialBudget)
	defer cancel()
	if err := admin.Ping(dial); err != nil {
		admin.Close()
		return nil, fmt.Errorf("connect to %v: %w", brokers, explain(withCause(ctx, err)))
	}
	return t, nil
}

// options are the user's, then ours, then those of one client.
func (t *BrokerTransport) options(own ...kgo.Opt) []kgo.Opt {
	all := make([]kgo.Opt, 0, len(t.config.clientOptions)+len(t.base)+len(own))
	all = append(all, t.config.clientOptions...)
	all = append(all, t.base...)
	return append(all, own...)
}

// retryBackoff is short: what waits behind it is an election.
func retryBackoff(attempt int) time.Duration {
	return saturatingDouble(20*time.Millisecond, attempt-1, 250*time.Millisecond)
}

// Close ends the transport at once: leaderships end with [ErrClosed] and campaigns
// fail with it. It waits for the transport's own goroutines and for nothing else.
// Closing twice is harmless.
func (t *BrokerTransport) Close() {
	if t.admin == nil {
		return // the zero value
	}
	t.closeOnce.Do(func() {
		close(t.closed)
		t.mu.Lock()
		reader := t.reader
		t.reader = nil
		t.mu.Unlock()
		if reader != nil {
			reader.close(ErrClosed)
		}
		t.admin.Close()
		close(t.ended)
	})
	<-t.ended
}

// Shutdown ends the transport gracefully, as [net/http.Server.Shutdown] does: all
// roles drain and resign in parallel, campaigns end, and when that is done, or ctx
// has ended, it closes the transport. It returns ctx's error if that came first.
func (t *BrokerTransport) Shutdown(ctx context.Context) error {
	if t.admin == nil {
		return nil // the zero value
	}
	t.drainOnce.Do(func() { close(t.draining) })
	t.mu.Lock()
	empty := t.empty
	t.mu.Unlock()
	var err error
	select {
	case <-empty:
	case <-t.closed:
	case <-ctx.Done():
		err = ctx.Err()
	}
	t.Close()
	return err
}

// arrived and departed count the members: Shutdown waits for them.
func (t *BrokerTransport) arrived() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.members++; t.members == 1 {
		t.empty = make(chan struct{})
	}
}

func (t *BrokerTransport) departed() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.members--; t.members == 0 {
		close(t.empty)
	}
}

// Draining is closed when Shutdown starts.
func (t *BrokerTransport) Draining() <-chan struct{} { return t.draining }

// Closed is closed when Close starts.
func (t *BrokerTransport) Closed() <-chan struct{} { return t.closed }

// check says whether the transport still takes calls.
func (t *BrokerTransport) check(role Role) error {
	if err := t.open(); err != nil {
		return fmt.Errorf("role %s: %w", role, err)
	}
	return validRole(role)
}

func (t *BrokerTransport) open() error {
	if t.admin == nil {
		return fmt.Errorf("%w: it is the zero value: make one with NewBrokerTransport", ErrClosed)
	}
	select {
	case <-t.closed:
		return ErrClosed
	default:
		return nil
	}
}

// withCause names the end of ctx as the cause of an error where it is.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// wrap adds the role to an error, and names the end of ctx, or of the transport, as
// its cause where it is.
func (t *BrokerTransport) wrap(ctx context.Context, what string, role Role, err error) error {
	if err == nil {
		return nil
	}
	err = withCause(ctx, err)
	select {
	case <-t.closed:
		if !errors.Is(err, ErrClosed) {
			err = fmt.Errorf("%w: %w", ErrClosed, err)
		}
	default:
	}
	return fmt.Errorf("%s role %s: %w", what, role, explain(err))
}

// start returns the reader, and on first use looks the topic up, creates it if a
// member asks, and starts the reader.
func (t *BrokerTransport) start(ctx context.Context, member bool) (*reader, error) {
	select {
	case t.starting <- struct{}{}:
		defer func() { <-t.starting }()
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-t.closed:
		return nil, ErrClosed
	}
	if r := t.running(); r != nil {
		return r, nil
	}
	topic, err := t.findTopic(ctx, member)
	if err != nil {
		return nil, err
	}
	r, err := newReader(t, topic)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	old := t.reader
	t.reader = r
	t.mu.Unlock()
	if old != nil {
		old.close(old.err)
	}
	select {
	case <-t.closed:
		r.close(ErrClosed)
		return nil, ErrClosed
	default:
		return r, nil
	}
}

// running returns the reader unless it failed: a topic that changed is read anew
// by those who ask again.
func (t *BrokerTransport) running() *reader {
	t.mu.Lock()
	r := t.reader
	t.mu.Unlock()
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil
	}
	return r
}

// findTopic looks the state topic up, checks it, and creates it where it is
// missing and may be.
func (t *BrokerTransport) findTopic(ctx context.Context, member bool) (stateTopic, error) {
	ctx, cancel := context.WithTimeout(ctx, t.config.requestTimeout)
	defer cancel()
	topic, err := describeTopic(ctx, t.kadm, t.config.topic)
	if err == nil {
		return topic, t.checkTopic(ctx)
	}
	if !errors.Is(err, kerr.UnknownTopicOrPartition) {
		return topic, err
	}
	if !member {
		return topic, fmt.Errorf("%w: no member has created it yet", err)
	}
	if !t.config.createTopic {
		return topic, invalidConfig("topic %s does not exist and WithTopicCreation is off: create it: %w", t.config.topic, err)
	}
	created, err := createTopic(ctx, t.kadm, t.config)
	if err != nil {
		return topic, err
	}
	topic, err = t.awaitTopic(ctx)
	if err != nil || !created {
		return topic, errors.Join(err, t.checkTopic(ctx))
	}
	t.config.logger.Info("created the state topic", "topic", t.config.topic,
		"partitions", t.config.partitions, "replication", t.config.replication)
	return topic, nil
}

// checkTopic refuses settings of the topic that break correctness, and warns of those
// that only cost something.
func (t *BrokerTransport) checkTopic(ctx context.Context) error {
	warnings, err := checkTopic(ctx, t.kadm, t.config.topic)
	for _, warning := range warnings {
		t.config.logger.Warn("the state topic is not set up as it should be", "topic", t.config.topic, "warning", warning)
	}
	return err
}

// awaitTopic waits until the brokers know a topic that was just created.
func (t *BrokerTransport) awaitTopic(ctx context.Context) (stateTopic, error) {
	for attempt := 1; ; attempt++ {
		topic, err := describeTopic(ctx, t.kadm, t.config.topic)
		if err == nil && topic.partitions > 0 && topic.led {
			return topic, nil
		}
		select {
		case <-ctx.Done():
			return topic, errors.Join(ctx.Err(), err)
		case <-t.closed:
			return topic, ErrClosed
		case <-time.After(retryBackoff(attempt)):
		}
	}
}

// Follow implements [Transport].
func (t *BrokerTransport) Follow(ctx context.Context, role Role, self MemberID) (Follower, error) {
	if err := t.check(role); err != nil {
		return nil, err
	}
	r, err := t.start(ctx, self != MemberID{})
	if err != nil {
		return nil, t.wrap(ctx, "follow", role, err)
	}
	sub, err := r.follow(role, self)
	if err != nil {
		return nil, t.wrap(ctx, "follow", role, err)
	}
	if self != (MemberID{}) {
		t.arrived()
	}
	return sub, nil
}

// Read implements [Transport].
func (t *BrokerTransport) Read(ctx context.Context, role Role) (RoleView, error) {
	follower, err := t.Follow(ctx, role, MemberID{})
	if err != nil {
		return RoleView{}, err
	}
	defer follower.Close()
	view, err := follower.Barrier(ctx)
	return view, t.wrap(ctx, "read", role, err)
}

// Roles implements [Transport].
func (t *BrokerTransport) Roles(ctx context.Context) (<-chan RoleList, error) {
	if err := t.open(); err != nil {
		return nil, err
	}
	r, err := t.start(ctx, false)
	if err != nil {
		return nil, fmt.Errorf("list roles: %w", explain(withCause(ctx, err)))
	}
	return r.followAll(ctx)
}

// Describe implements [Transport].
func (t *BrokerTransport) Describe(ctx context.Context, role Role) (LeadershipStatus, error) {
	if err := t.check(role); err != nil {
		return LeadershipStatus{}, err
	}
	if ctx.Err() != nil {
		return LeadershipStatus{}, t.wrap(ctx, "describe", role, context.Cause(ctx))
	}
	bounded, cancel := context.WithTimeout(ctx, t.config.requestTimeout)
	defer cancel()
	status, err := describe(bounded, t.kadm, role)
	return status, t.wrap(ctx, "describe", role, err)
}

// describe asks the coordinator of a role over a client, and asks again while the
// coordinator moves or starts.
func describe(ctx context.Context, admin *kadm.Client, role Role) (LeadershipStatus, error) {
	for attempt := 1; ; attempt++ {
		status, err := describeOnce(ctx, admin, role)
		if err == nil || !kerr.IsRetriable(err) {
			return status, err
		}
		if wait := sleep(ctx, retryBackoff(attempt)); wait != nil {
			return status, fmt.Errorf("%w: %w", wait, err)
		}
	}
}

func describeOnce(ctx context.Context, admin *kadm.Client, role Role) (LeadershipStatus, error) {
	described, err := admin.DescribeTransactions(ctx, role.String())
	if err != nil {
		return LeadershipStatus{}, err
	}
	txn, err := described.On(role.String(), nil)
	if err == nil {
		err = txn.Err
	}
	if errors.Is(err, kerr.TransactionalIDNotFound) {
		return LeadershipStatus{Role: role, State: TransactionEmpty, Coordinator: txn.Coordinator}, nil
	}
	if err != nil {
		return LeadershipStatus{}, err
	}
	token, err := NewFencingToken(txn.ProducerID, txn.ProducerEpoch)
	if err != nil {
		return LeadershipStatus{}, fmt.Errorf("the coordinator answered with a token that cannot be: %w", err)
	}
	status := NewLeadershipStatus(role, token, TransactionState(txn.State))
	status.Coordinator = txn.Coordinator
	status.TransactionTimeout = time.Duration(txn.TimeoutMillis) * time.Millisecond
	if txn.StartTimestamp > 0 {
		status.StartedAt = time.UnixMilli(txn.StartTimestamp).UTC()
	}
	return status, nil
}

// CommittedOffsets implements [Transport].
func (t *BrokerTransport) CommittedOffsets(ctx context.Context, group string) (kadm.OffsetResponses, error) {
	if err := t.open(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, t.config.requestTimeout)
	defer cancel()
	for attempt := 1; ; attempt++ {
		offsets, err := t.kadm.FetchOffsets(kadm.RequireStable(ctx), group)
		switch {
		case err == nil:
			return offsets, nil
		case errors.Is(err, kerr.GroupIDNotFound):
			return kadm.OffsetResponses{}, nil // it has not committed anything yet
		case !kerr.IsRetriable(err):
			return nil, fmt.Errorf("read the offsets of group %s: %w", group, explain(err))
		}
		if wait := sleep(ctx, retryBackoff(attempt)); wait != nil {
			return nil, fmt.Errorf("read the offsets of group %s: %w: %w", group, wait, err)
		}
	}
}

// Register implements [Transport].
func (t *BrokerTransport) Register(ctx context.Context, role Role, registration Registration) (int64, error) {
	offset, err := t.append(ctx, RegistrationKey(role, registration.Member), registration)
	return offset, t.wrap(ctx, "register "+registration.Member.String()+" for", role, err)
}

// Withdraw implements [Transport].
func (t *BrokerTransport) Withdraw(ctx context.Context, role Role, member MemberID) error {
	_, err := t.append(ctx, RegistrationKey(role, member), Tombstone{})
	return t.wrap(ctx, "withdraw "+member.String()+" from", role, err)
}

// append writes one record outside any transaction.
func (t *BrokerTransport) append(ctx context.Context, key Key, value Record) (int64, error) {
	if err := t.check(key.Role); err != nil {
		return 0, err
	}
	r, err := t.start(ctx, true)
	if err != nil {
		return 0, err
	}
	record, err := stateRecord(r.topic, key, value)
	if err != nil {
		return 0, err
	}
	// kgo does not give a record up that is on its way, whatever becomes of ctx.
	written := make(chan error, 1)
	t.admin.Produce(ctx, record, func(_ *kgo.Record, err error) { written <- err })
	select {
	case err = <-written:
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-t.closed:
		err = ErrClosed
	}
	if err != nil {
		return 0, fmt.Errorf("append to topic %s: %w", r.topic.name, err)
	}
	return record.Offset, nil
}

// stateRecord encodes a record and places it by hand in the partition of its
// role.
func stateRecord(topic stateTopic, key Key, value Record) (*kgo.Record, error) {
	partition, err := RolePartition(key.Role, topic.partitions)
	if err != nil {
		return nil, err
	}
	encodedKey, err := EncodeKey(key)
	if err != nil {
		return nil, err
	}
	encodedValue, err := EncodeValue(value)
	if err != nil {
		return nil, err
	}
	return &kgo.Record{Topic: topic.name, Partition: partition, Key: encodedKey, Value: encodedValue}, nil
}

// NewTerm implements [Transport].
func (t *BrokerTransport) NewTerm(role Role, config TermConfig) (Term, error) {
	if err := t.check(role); err != nil {
		return nil, err
	}
	r := t.running()
	if r == nil {
		return nil, fmt.Errorf("role %s: nobody on this transport follows it: call Follow first", role)
	}
	return newBrokerTerm(t, r.topic, role, config)
}
