package coordination

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
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
	writable  atomic.Pointer[map[string]bool] // topics that may be written to; replaced, not changed

	// offsetsAdded is set while the coordinator has a transaction open of which
	// kgo need not know. It belongs to the one who commits.
	offsetsAdded bool

	// loaded are the topics of which kgo has stored the partitions. It belongs to
	// the one who commits.
	loaded map[string]bool

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
	if config.StallTimeout <= 0 {
		config.StallTimeout = time.Second
	}
	term := &brokerTerm{transport: t, topic: topic, role: role, config: config, loaded: make(map[string]bool)}
	term.writable.Store(&map[string]bool{})
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
		// The elector bounds what is buffered; here nothing may wait for room.
		kgo.MaxBufferedRecords(math.MaxInt),
		kgo.MaxBufferedBytes(0),
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
	return t.transport.wrap(ctx, "prepare a term of", t.role, err)
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
		err = t.transport.wrap(ctx, "mint an epoch of", t.role, err)
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
	// kgo ignores contexts in the middle of a transaction; closing the client
	// frees everything that waits in it.
	stop := context.AfterFunc(ctx, func() { t.end(context.Cause(ctx)) })
	defer stop()

	if err := t.client.BeginTransaction(); err != nil {
		return -1, t.lost(ctx, "begin a transaction", err)
	}
	records, failed := t.write(ctx, batch)
	if len(failed) > 0 {
		return -1, t.rollback(ctx, records, failed)
	}
	if err := t.addOffsets(ctx, batch.Offsets); err != nil {
		return -1, t.rollback(ctx, nil, []failure{{nil, err}})
	}
	if _, failed := t.write(ctx, Batch{Records: state}); len(failed) > 0 {
		return -1, t.rollback(ctx, nil, failed)
	}
	t.offsetsAdded = false
	t.endAttempts.Store(0)
	if err := t.client.EndTransaction(context.Background(), kgo.TryCommit); err != nil {
		return -1, t.failedCommit(ctx, err, evidence(records, state))
	}
	if t.endAttempts.Load() == 0 && len(records)+len(state) > 0 {
		return -1, t.lost(ctx, "commit", errNotEnded)
	}
	if t.unanswered.Load() {
		t.end(fmt.Errorf("role %s: %w", t.role, ErrUnanswered))
	}
	if lease == nil {
		return -1, nil
	}
	return lease.Offset, nil
}

// Check looks up the topics that this term has not written to yet. A topic that is
// refused in the middle of a transaction would take everything else in it along, and
// one that is unauthorized the term itself.
func (t *brokerTerm) Check(ctx context.Context, records []*kgo.Record) error {
	var unknown []string
	writable := *t.writable.Load()
	for _, r := range records {
		if !writable[r.Topic] && !slices.Contains(unknown, r.Topic) {
			unknown = append(unknown, r.Topic)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, t.config.StallTimeout)
	defer cancel()
	refused, err := t.describeWritable(ctx, unknown)
	if slices.Contains(unknown, t.topic.name) {
		refused[t.topic.name] = invalidConfig("topic %q holds the leaderships themselves: write to another one", t.topic.name)
	}
	if err == nil {
		t.noteWritable(unknown, refused)
	}
	var failed []failure
	for _, r := range records {
		if err := refused[r.Topic]; err != nil {
			failed = append(failed, failure{r, err})
		}
	}
	return rejected(records, failed)
}

// describeWritable asks again about topics that are not there: brokers learn of a new
// one at different times. Where nothing can be told now, the writing will tell.
func (t *brokerTerm) describeWritable(ctx context.Context, topics []string) (refused map[string]error, err error) {
	for attempt := 1; ; attempt++ {
		refused, err = describeWritable(ctx, t.client, topics)
		missing := false
		for _, why := range refused {
			missing = missing || errors.Is(why, kerr.UnknownTopicOrPartition)
		}
		if !missing || attempt == 4 || sleep(ctx, retryBackoff(attempt)) != nil {
			return refused, err
		}
	}
}

// noteWritable notes of topics whether they may be written to.
func (t *brokerTerm) noteWritable(topics []string, refused map[string]error) {
	for {
		before := t.writable.Load()
		after := maps.Clone(*before)
		for _, topic := range topics {
			if delete(after, topic); refused[topic] == nil {
				after[topic] = true
			}
		}
		if t.writable.CompareAndSwap(before, &after) {
			return
		}
	}
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

// A wave is a number of records on their way.
type wave struct {
	pending atomic.Int64  // and one until it is complete
	done    chan struct{} // closed when all are answered

	mu     sync.Mutex // guards failed
	failed []failure
}

func newWave() *wave {
	w := &wave{done: make(chan struct{})}
	w.pending.Store(1)
	return w
}

func (w *wave) send(client *kgo.Client, records []*kgo.Record) {
	w.pending.Add(int64(len(records)))
	for _, record := range records {
		client.Produce(context.Background(), record, w.answered)
	}
}

func (w *wave) answered(r *kgo.Record, err error) {
	if err != nil {
		w.mu.Lock()
		w.failed = append(w.failed, failure{r, err})
		w.mu.Unlock()
	}
	w.settled()
}

func (w *wave) settled() {
	if w.pending.Add(-1) == 0 {
		close(w.done)
	}
}

// joinWindow is how long calls may join a transaction while its first records are on
// their way. Who waits in the queue can still withdraw.
const joinWindow = 20 * time.Millisecond

// write writes the records of a batch in the open transaction, and those that come
// up until they are answered: by then the coordinator has added the partitions, and
// what is sent meanwhile follows closely behind. It waits for all of them, and returns
// those that failed.
func (t *brokerTerm) write(ctx context.Context, batch Batch) (records []*kgo.Record, failed []failure) {
	records = slices.Clip(batch.Records) // the caller owns what is behind it
	if len(records) == 0 {
		return nil, nil
	}
	first, later := newWave(), newWave()
	first.send(t.client, records)
	first.settled()
	var (
		ready   = batch.Ready
		waiting = first
		aborted chan struct{} // closed when nothing is aborted any more
	)
	joining := time.NewTimer(joinWindow)
	defer joining.Stop()
	stalled := time.NewTimer(t.config.StallTimeout)
	defer stalled.Stop()
	for waiting != nil {
		select {
		case <-joining.C:
			ready = nil
		case <-ready:
			more := batch.More()
			records = append(records, more...)
			later.send(t.client, more)
		case <-waiting.done:
			if ready = nil; waiting == later {
				waiting = nil
				continue
			}
			waiting = later
			later.settled()
		case <-stalled.C:
			// kgo would try for ever. Records without an answer stay where
			// they are until they have one.
			aborted = make(chan struct{})
			go func() {
				defer close(aborted)
				_ = t.client.AbortBufferedRecords(ctx)
			}()
		}
	}
	failed = append(first.failed, later.failed...)
	if aborted != nil {
		<-aborted
		failed = t.blame(ctx, failed)
	}
	t.awaitLoaded(ctx, records, failed)
	return records, failed
}

// blame says of records that were given up whose fault that was. A topic that has gone,
// or may no longer be written to, holds up the others that are new to the transaction:
// Kafka adds all of them or none. Those are left out, and not to blame, whether the
// client has noticed what holds them up, and says so of its records, or the cluster
// has to be asked.
func (t *brokerTerm) blame(ctx context.Context, failed []failure) (guilty []failure) {
	var topics []string
	for i, f := range failed {
		if errors.Is(f.err, kgo.ErrAborting) {
			failed[i].err = &stallError{topic: f.record.Topic, partition: f.record.Partition, extent: t.config.StallTimeout}
			topics = append(topics, f.record.Topic)
		}
	}
	var refused map[string]error
	if len(topics) == len(failed) {
		refused = t.whichRefuse(ctx, topics)
		if len(refused) == 0 {
			return failed
		}
	}
	for _, f := range failed {
		if why := refused[f.record.Topic]; why != nil {
			f.err = why
		} else if isStall(f.err) {
			continue
		}
		guilty = append(guilty, f)
	}
	return guilty
}

// whichRefuse asks which topics may not be written to any more, and notes it.
func (t *brokerTerm) whichRefuse(ctx context.Context, topics []string) map[string]error {
	slices.Sort(topics)
	topics = slices.Compact(topics)
	ctx, cancel := context.WithTimeout(ctx, t.config.StallTimeout/4)
	defer cancel()
	refused, err := describeWritable(ctx, t.client, topics)
	if err != nil {
		return nil
	}
	t.noteWritable(topics, refused)
	return refused
}

// errNotEnded is a commit that kgo reports and never asked for.
var errNotEnded = errors.New("the client ended the transaction without asking for its commit")

// awaitLoaded waits until kgo has stored the partitions of topics that were written to
// for the first time. It sends the records that waited for a topic's partitions a
// moment before it stores them, and at the end of a transaction looks only at those
// that are stored: a transaction that ends in between stays open, and EndTransaction
// reports that all went well (kgo 1.22, storePartitionsUpdate).
func (t *brokerTerm) awaitLoaded(ctx context.Context, records []*kgo.Record, failed []failure) {
	for _, r := range records {
		if t.loaded[r.Topic] {
			continue
		}
		refused := slices.ContainsFunc(failed, func(f failure) bool { return f.record == r })
		for pause := 10 * time.Microsecond; ; pause *= 2 {
			if leader, _, err := t.client.PartitionLeader(r.Topic, 0); leader >= 0 || err != nil {
				t.loaded[r.Topic] = err == nil
				break
			}
			// One that was refused may never have come as far as a partition.
			if refused && pause > joinWindow || t.Err() != nil || sleep(ctx, pause) != nil {
				break
			}
		}
	}
}

// A stallError is a record that its partition did not take in time.
type stallError struct {
	topic     string
	partition int32
	extent    time.Duration
}

func (e *stallError) Error() string {
	return fmt.Sprintf("%s/%d took no write for %s: try again, and if that does not help, see that the topic is still there, that the partition has a leader, and that enough of its replicas are in sync", e.topic, e.partition, e.extent)
}

func isStall(err error) bool {
	var stall *stallError
	return errors.As(err, &stall)
}

// Is makes it a timeout.
func (e *stallError) Is(target error) bool { return target == context.DeadlineExceeded }

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
	// Nothing is buffered any more, but kgo may still be adding to the transaction
	// the partition of a record that it has given up.
	err := t.client.AbortBufferedRecords(ctx)
	if err == nil {
		err = t.client.EndTransaction(context.Background(), kgo.TryAbort)
	}
	if err != nil {
		return t.lost(ctx, what, errors.Join(cause.err, err))
	}
	// kgo ends what it knows to be open. Offsets that were added would be committed
	// with the next transaction.
	if t.offsetsAdded {
		t.offsetsAdded = false
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
		t.writable.Store(&map[string]bool{})
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
