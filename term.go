package coordination

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// classifyTimeout bounds how long the end of a fenced term waits for the
// coordinator's word on what happened.
const classifyTimeout = 500 * time.Millisecond

// pinnedVersions keeps a term at version 1 of the transaction protocol. Under
// version 2 every EndTxn bumps the epoch, and the token would change with each
// commit (KIP-890).
func pinnedVersions() *kversion.Versions {
	versions := kversion.Stable()
	versions.SetMaxKeyVersion(int16(kmsg.Produce), 11)
	versions.SetMaxKeyVersion(int16(kmsg.EndTxn), 4)
	versions.SetMaxKeyVersion(int16(kmsg.TxnOffsetCommit), 4)
	return versions
}

// A brokerTerm is a [Term] on a transactional client of its own.
type brokerTerm struct {
	transport *BrokerTransport
	topic     stateTopic
	role      Role
	config    TermConfig
	client    *kgo.Client
	token     FencingToken
	writable  map[string]bool // topics that were looked up; of the one who commits

	// offsetsAdded is set while the coordinator has a transaction open of which
	// kgo need not know. It belongs to the one who commits.
	offsetsAdded bool

	// purged are the topics of the present transaction that were given up.
	purged []string

	// unanswered is set once an attempt that may change a transaction ended
	// without an answer. What it was about may still take effect, in the middle
	// of the next transaction.
	unanswered atomic.Bool
	// unansweredEnd is set when such an attempt was an EndTxn.
	unansweredEnd atomic.Bool
	// endAttempts counts the EndTxn of the present commit that were sent. One
	// that was answered with a retriable error may have taken effect.
	endAttempts atomic.Int32

	mu  sync.Mutex // guards err
	err error
}

func newBrokerTerm(t *BrokerTransport, topic stateTopic, role Role, config TermConfig) (*brokerTerm, error) {
	term := &brokerTerm{transport: t, topic: topic, role: role, config: config, writable: map[string]bool{topic.name: true}}
	// The user's partitioner is known only to a client made of the user's
	// options.
	user, err := kgo.NewClient(append(t.options(), config.ProducerOptions...)...)
	if err != nil {
		return nil, invalidConfig("WithProducerOptions: %v", err)
	}
	partitioner, _ := user.OptValue(kgo.RecordPartitioner).(kgo.Partitioner)
	user.Close()

	opts := append(t.options(), config.ProducerOptions...)
	opts = append(opts, t.base...) // ours last
	opts = append(opts,
		kgo.TransactionalID(role.String()),
		kgo.TransactionTimeout(config.TransactionTimeout),
		kgo.MaxVersions(pinnedVersions()),
		// Back-to-back commits wait for the markers of the one before, which
		// take a millisecond or two.
		kgo.ConcurrentTransactionsBackoff(time.Millisecond),
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.RecordPartitioner(statePartitioner{topic: topic.name, user: partitioner}),
		kgo.ProducerLinger(0),
		kgo.RequestTimeoutOverhead(max(min(config.AttemptTimeout, t.config.requestTimeout), 100*time.Millisecond)),
		kgo.WithHooks(answerHook{term}),
	)
	if term.client, err = kgo.NewClient(opts...); err != nil {
		return nil, invalidConfig("WithProducerOptions: %v", err)
	}
	return term, nil
}

// answerHook notices attempts that ended without an answer.
type answerHook struct{ term *brokerTerm }

func (h answerHook) OnBrokerE2E(_ kgo.BrokerMetadata, key int16, e kgo.BrokerE2E) {
	if kmsg.Key(key) == kmsg.EndTxn {
		h.term.endAttempts.Add(1)
	}
	if e.Err() == nil {
		return
	}
	switch kmsg.Key(key) {
	case kmsg.EndTxn:
		h.term.unansweredEnd.Store(true)
		h.term.unanswered.Store(true)
	case kmsg.Produce, kmsg.AddPartitionsToTxn, kmsg.AddOffsetsToTxn, kmsg.TxnOffsetCommit:
		h.term.unanswered.Store(true)
	}
}

// statePartitioner places records of the state topic by hand and leaves all
// others to the user's partitioner.
type statePartitioner struct {
	topic string
	user  kgo.Partitioner
}

func (p statePartitioner) ForTopic(topic string) kgo.TopicPartitioner {
	if topic == p.topic {
		return kgo.ManualPartitioner().ForTopic(topic)
	}
	return p.user.ForTopic(topic)
}

// Warm asks the coordinator something, because that is the way to have kgo find it
// and connect to it, and opens the connections of the produce requests.
func (t *brokerTerm) Warm(ctx context.Context) error {
	_, err := describe(ctx, kadm.NewClient(t.client), t.role)
	if err == nil {
		err = t.client.EnsureProduceConnectionIsOpen(ctx)
	}
	return t.transport.wrap("prepare a term of", t.role, err)
}

func (t *brokerTerm) Mint(ctx context.Context) (FencingToken, error) {
	if err := t.Err(); err != nil {
		return FencingToken{}, err
	}
	id, epoch, err := t.client.ProducerID(ctx)
	if err == nil {
		t.token, err = NewFencingToken(id, epoch)
	}
	if err != nil {
		err = t.transport.wrap("mint an epoch of", t.role, err)
		t.end(err)
	}
	return t.token, err
}

func (t *brokerTerm) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// end notes why the term is over, if it was not, and frees the client.
func (t *brokerTerm) end(cause error) {
	t.mu.Lock()
	if t.err == nil {
		t.err = cause
	}
	t.mu.Unlock()
	t.client.Close()
}

func (t *brokerTerm) Close() { t.end(ErrClosed) }

func (t *brokerTerm) Commit(ctx context.Context, batch Batch) (int64, error) {
	if ctx.Err() != nil {
		t.end(context.Cause(ctx))
	}
	if err := t.Err(); err != nil {
		return -1, err
	}
	state, lease, err := t.encode(batch)
	if err != nil {
		return -1, err
	}
	if len(batch.Offsets) > 0 && len(batch.Records)+len(state) == 0 {
		// kgo does not know of the offsets, and would end nothing.
		return -1, invalidConfig("role %s: offsets need a record or a lease beside them", t.role)
	}
	if refused := t.checkTopics(ctx, batch.Records); len(refused) > 0 {
		return -1, rejected(batch.Records, refused)
	}
	// kgo ignores contexts in the middle of a transaction; closing the client
	// frees everything that waits in it.
	stop := context.AfterFunc(ctx, func() { t.end(context.Cause(ctx)) })
	defer stop()

	if err := t.client.BeginTransaction(); err != nil {
		return -1, t.lost(ctx, "begin a transaction", err)
	}
	records := slices.Clip(batch.Records) // the caller owns what is behind it
	failed := t.produce(records)
	if len(failed) == 0 && batch.More != nil {
		if more := batch.More(); len(more) > 0 {
			records = append(records, more...)
			if failed = t.checkTopics(ctx, more); len(failed) == 0 {
				failed = t.produce(more)
			}
		}
	}
	if len(failed) > 0 {
		return -1, t.rollback(ctx, records, failed)
	}
	if err := t.addOffsets(ctx, batch.Offsets); err != nil {
		return -1, t.rollback(ctx, nil, []failure{{nil, err}})
	}
	if failed := t.produce(state); len(failed) > 0 {
		return -1, t.rollback(ctx, nil, failed)
	}
	t.offsetsAdded = false
	t.endAttempts.Store(0)
	if err := t.client.EndTransaction(context.Background(), kgo.TryCommit); err != nil {
		return -1, t.failedCommit(ctx, err, evidence(records, state))
	}
	if t.unanswered.Load() {
		t.end(fmt.Errorf("role %s: %w", t.role, ErrUnanswered))
	}
	if lease == nil {
		return -1, nil
	}
	return lease.Offset, nil
}

// checkTopics looks up the topics that this term has not written to yet. A topic that
// is refused in the middle of a transaction would take everything else in it along,
// and one that is unauthorized the term itself.
func (t *brokerTerm) checkTopics(ctx context.Context, records []*kgo.Record) []failure {
	var unknown []string
	for _, r := range records {
		if !t.writable[r.Topic] && !slices.Contains(unknown, r.Topic) {
			unknown = append(unknown, r.Topic)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, t.patience())
	defer cancel()
	// Where it cannot be told now, the writing will tell.
	refused, _ := describeWritable(ctx, t.transport.admin, unknown)
	for _, topic := range unknown {
		if refused[topic] == nil {
			t.writable[topic] = true
		}
	}
	if len(refused) == 0 {
		return nil
	}
	var failed []failure
	for _, r := range records {
		if err := refused[r.Topic]; err != nil {
			failed = append(failed, failure{r, err})
		}
	}
	return failed
}

// rejected makes rejections of failures of the user's records, and nil of others.
func rejected(records []*kgo.Record, failed []failure) error {
	var rejections []error
	for _, f := range failed {
		if i := slices.Index(records, f.record); i >= 0 {
			rejections = append(rejections, &RejectedError{Index: i, Record: f.record, Err: f.err})
		}
	}
	return errors.Join(rejections...)
}

// encode makes the records of the state topic, the lease last.
func (t *brokerTerm) encode(batch Batch) (records []*kgo.Record, lease *kgo.Record, err error) {
	for _, member := range batch.Withdraw {
		record, err := stateRecord(t.topic, RegistrationKey(t.role, member), Tombstone{})
		if err != nil {
			return nil, nil, err
		}
		records = append(records, record)
	}
	if batch.Lease != nil {
		if lease, err = stateRecord(t.topic, LeaseKey(t.role), batch.Lease); err != nil {
			return nil, nil, err
		}
		records = append(records, lease)
	}
	return records, lease, nil
}

// A failure is a record that could not be written, or nil for something else.
type failure struct {
	record *kgo.Record
	err    error
}

// produce writes records in the open transaction and waits for all of them. It
// returns those that failed.
func (t *brokerTerm) produce(records []*kgo.Record) []failure {
	if len(records) == 0 {
		return nil
	}
	var (
		mu      sync.Mutex
		failed  []failure
		pending atomic.Int64
		done    = make(chan struct{})
	)
	pending.Store(int64(len(records)))
	promise := func(r *kgo.Record, err error) {
		if err != nil {
			mu.Lock()
			failed = append(failed, failure{r, err})
			mu.Unlock()
		}
		if pending.Add(-1) == 0 {
			close(done)
		}
	}
	for _, record := range records {
		t.client.Produce(context.Background(), record, promise)
	}
	// The records of a topic that is deleted meanwhile would be tried again for
	// ever, and hold up all others.
	stalled := time.NewTicker(t.patience() / 2)
	defer stalled.Stop()
	for {
		select {
		case <-done:
			return append(failed, t.given(records)...)
		case <-stalled.C:
			t.giveUpDeleted(records)
		}
	}
}

// giveUpDeleted makes kgo fail the records of topics that are no longer there. It
// then forgets that they were part of the transaction, too.
func (t *brokerTerm) giveUpDeleted(records []*kgo.Record) {
	var topics []string
	for _, r := range records {
		if r.Topic != t.topic.name && !slices.Contains(topics, r.Topic) {
			topics = append(topics, r.Topic)
		}
	}
	if len(topics) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), t.patience()/4)
	defer cancel()
	refused, err := describeWritable(ctx, t.transport.admin, topics)
	if err != nil {
		return
	}
	for topic, why := range refused {
		if errors.Is(why, kerr.UnknownTopicOrPartition) {
			t.purged = append(t.purged, topic)
			t.client.PurgeTopicsFromProducing(topic)
		}
	}
}

// given lists the records of topics that were given up. Those among them that were
// written in the last moment failed as well: kgo would not commit them.
func (t *brokerTerm) given(records []*kgo.Record) []failure {
	var failed []failure
	for _, r := range records {
		if slices.Contains(t.purged, r.Topic) {
			failed = append(failed, failure{r, kerr.UnknownTopicOrPartition})
		}
	}
	return failed
}

// patience is how long a question about topics may hold up the transaction.
func (t *brokerTerm) patience() time.Duration {
	return max(min(t.config.TransactionTimeout, t.config.AttemptTimeout), 100*time.Millisecond)
}

// isFence reports whether an error is a sign that the epoch is no longer the
// newest one.
func isFence(err error) bool {
	for _, sign := range []error{
		kerr.InvalidProducerEpoch, kerr.ProducerFenced, kerr.InvalidTxnState,
		kerr.InvalidProducerIDMapping, kerr.TransactionCoordinatorFenced, kerr.UnknownProducerID,
	} {
		if errors.Is(err, sign) {
			return true
		}
	}
	return false
}

// rollback aborts after something failed, and says what that means: for the calls
// it belongs to, or for the term. Failures of the user's records are rejections.
func (t *brokerTerm) rollback(ctx context.Context, records []*kgo.Record, failed []failure) error {
	cause := failed[0]
	for _, f := range failed {
		if isFence(f.err) {
			cause = f
		}
	}
	what := "add offsets"
	if cause.record != nil {
		what = fmt.Sprintf("write to %s/%d", cause.record.Topic, cause.record.Partition)
	}
	if isFence(cause.err) || t.Err() != nil || t.unanswered.Load() {
		return t.lost(ctx, what, cause.err)
	}
	if err := t.client.EndTransaction(context.Background(), kgo.TryAbort); err != nil {
		return t.lost(ctx, what, errors.Join(cause.err, err))
	}
	// kgo ends what it knows to be open. Offsets that were added, and records of
	// topics that were given up, would be committed with the next transaction.
	if t.offsetsAdded || len(t.purged) > 0 {
		t.offsetsAdded, t.purged = false, nil
		if err := t.abortByHand(ctx); err != nil {
			return t.lost(ctx, what, errors.Join(cause.err, err))
		}
	}
	// After some aborts kgo asks for a new epoch by itself.
	id, epoch, err := t.client.ProducerID(ctx)
	if err != nil {
		return t.lost(ctx, what, errors.Join(cause.err, err))
	}
	if now, err := NewFencingToken(id, epoch); err != nil || now != t.token {
		return t.lost(ctx, what, fmt.Errorf("%w: the client re-initialised its epoch: %w", kerr.InvalidProducerEpoch, cause.err))
	}
	if t.unanswered.Load() {
		return t.lost(ctx, what, cause.err)
	}
	if cause.record == nil {
		return &RejectedError{Index: -1, Err: cause.err}
	}
	if err := rejected(records, failed); err != nil {
		// A topic that did not take a record is looked up again.
		clear(t.writable)
		t.writable[t.topic.name] = true
		return err
	}
	return fmt.Errorf("role %s: %s: %w", t.role, what, explain(cause.err))
}

// failedCommit sorts the failures of the commit request itself. Nothing may be
// asked of the client afterwards.
func (t *brokerTerm) failedCommit(ctx context.Context, err error, written []writtenAt) error {
	const what = "commit"
	if errors.Is(err, kerr.OperationNotAttempted) {
		return t.lost(ctx, what, err)
	}
	// A fence is proof that nothing was committed only if no earlier attempt
	// can have been.
	if isFence(err) && !t.unansweredEnd.Load() && t.endAttempts.Load() <= 1 {
		return t.lost(ctx, what, err)
	}
	t.end(fmt.Errorf("role %s: %w", t.role, ErrUnanswered))
	return NewOutcomeUnknownError(t.role, t.token, err, func(ctx context.Context) (bool, error) {
		return t.transport.resolve(ctx, t.role, t.token, written)
	})
}

// lost ends the term after nothing was committed, and says why.
func (t *brokerTerm) lost(ctx context.Context, what string, cause error) error {
	if err := t.Err(); err != nil {
		// Closed, or its time was up: the failure is a consequence.
		return fmt.Errorf("role %s: %s: %w", t.role, what, err)
	}
	var err error
	switch {
	case isFence(cause), errors.Is(cause, kerr.OperationNotAttempted):
		err = fmt.Errorf("role %s: %s: %w: %s: %w", t.role, what, ErrFenced, t.classify(ctx), cause)
	case t.unanswered.Load():
		err = fmt.Errorf("role %s: %s: %w: %w", t.role, what, ErrUnanswered, cause)
	default:
		err = fmt.Errorf("role %s: %s: %w", t.role, what, explain(cause))
	}
	t.end(err)
	return err
}

// classify asks the coordinator what fenced the term.
func (t *brokerTerm) classify(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, classifyTimeout)
	defer cancel()
	status, err := t.transport.Describe(ctx, t.role)
	if err != nil {
		return "the coordinator could not be asked why"
	}
	return classifyLoss(t.token, status)
}
