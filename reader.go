package coordination

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// barrierGrace is how long a barrier waits for the pushed tail before it
	// asks the log itself: compacted offsets never arrive.
	barrierGrace = 10 * time.Millisecond

	// topicCheckInterval is how often the topic is looked up, to notice that
	// it is not the one it was.
	topicCheckInterval = 4 * time.Second

	// missingFor is how long a topic has to be missing to have been deleted: one
	// broker may not know yet what others do.
	missingFor = 250 * time.Millisecond

	// verifying bounds how many tokens are checked with coordinators at once.
	verifying = 16
)

// A reader is the one read_committed consumer of a transport. It follows the
// partitions of the roles that it was asked about, folds what it sees, and pushes
// views.
type reader struct {
	transport *BrokerTransport
	topic     stateTopic
	consumer  *kgo.Client
	ctx       context.Context
	cancel    context.CancelFunc
	wg        sync.WaitGroup
	verify    chan struct{} // a slot for each check under way
	recheck   chan struct{} // asks for a look at the topic

	contact atomic.Int64 // of the last answer to a fetch, as time since born
	born    time.Time

	mu      sync.Mutex // guards what follows, and the logs and folds in it
	logs    map[int32]*partitionLog
	leaders map[int32]int32 // the brokers that last answered for a partition
	listers []chan RoleList // who list all roles
	err     error
}

// A partitionLog is the fold of one partition.
type partitionLog struct {
	partition int32
	position  int64
	roles     map[Role]*roleFold
	problems  []Problem
	changed   chan struct{} // closed and replaced whenever something changed
}

func newReader(t *BrokerTransport, topic stateTopic) (*reader, error) {
	ctx, cancel := context.WithCancel(context.Background())
	r := &reader{
		transport: t,
		topic:     topic,
		ctx:       ctx,
		cancel:    cancel,
		verify:    make(chan struct{}, verifying),
		recheck:   make(chan struct{}, 1),
		born:      time.Now(),
		logs:      make(map[int32]*partitionLog),
		leaders:   make(map[int32]int32),
	}
	consumer, err := kgo.NewClient(t.options(
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// A plain consumer is told nothing when only markers arrive, and
		// could not tell how far it has read.
		kgo.KeepControlRecords(),
		kgo.FetchMaxWait(t.config.fetchMaxWait),
		kgo.FetchMinBytes(1),
		kgo.FetchMaxPartitionBytes(t.config.fetchPartitionMax),
		// A partition whose log starts later than the position was cut: what
		// is left of it is all there is.
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.WithHooks(contactHook{r}),
	)...)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("start the reader of topic %s: %w", topic.name, err)
	}
	r.consumer = consumer
	r.contact.Store(0)
	r.wg.Go(r.consume)
	r.wg.Go(r.watchTopic)
	return r, nil
}

// close ends the reader and everything it started.
func (r *reader) close(cause error) {
	r.fail(cause)
	r.consumer.Close()
	r.wg.Wait()
}

// fail ends every subscription with a last view, and what the reader does.
func (r *reader) fail(cause error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return
	}
	r.err = cause
	r.publishRoles()
	for _, log := range r.logs {
		for _, fold := range log.roles {
			for _, sub := range fold.subscribers {
				sub.push(RoleView{Role: fold.role, Err: cause})
			}
		}
		log.wake()
	}
	r.cancel()
}

// contactHook notes when the cluster last answered a fetch.
type contactHook struct{ r *reader }

func (h contactHook) OnBrokerE2E(_ kgo.BrokerMetadata, key int16, e kgo.BrokerE2E) {
	if key == int16(kmsg.Fetch) && e.Err() == nil {
		h.r.contact.Store(int64(time.Since(h.r.born)))
	}
}

func (r *reader) lastContact() time.Time { return r.born.Add(time.Duration(r.contact.Load())) }

func (r *reader) consume() {
	failures := 0
	for {
		fetches := r.consumer.PollFetches(r.ctx)
		if r.ctx.Err() != nil || fetches.IsClientClosed() {
			return
		}
		seen := time.Now()
		r.mu.Lock()
		fetches.EachPartition(func(p kgo.FetchTopicPartition) {
			if log := r.logs[p.Partition]; log != nil && p.Topic == r.topic.name && len(p.Records) > 0 {
				r.fold(log, p.Records, seen)
			}
		})
		r.mu.Unlock()
		failed := fetches.Errors()
		if len(failed) == 0 {
			failures = 0
			continue
		}
		failures++
		r.suspect(failures, failed[0])
		select {
		case <-time.After(retryBackoff(failures)):
		case <-r.ctx.Done():
			return
		}
	}
}

// suspect logs the first of a row of failed reads, and has the topic looked at.
func (r *reader) suspect(failures int, failed kgo.FetchError) {
	level := slog.LevelDebug
	if failures == 1 {
		level = slog.LevelWarn
	}
	r.transport.config.logger.Log(r.ctx, level, "reading the state topic failed; retrying",
		"topic", failed.Topic, "partition", failed.Partition, "error", failed.Err)
	select {
	case r.recheck <- struct{}{}:
	default:
	}
}

// fold applies records that arrived in the order of the log, and pushes a view
// to the subscribers of each role they touched. mu is held.
func (r *reader) fold(log *partitionLog, records []*kgo.Record, seen time.Time) {
	touched := make(map[*roleFold]struct{})
	arrived := false
	for _, record := range records {
		if record.Offset < log.position {
			continue
		}
		log.position = record.Offset + 1
		if record.Attrs.IsControl() {
			continue
		}
		key, err := DecodeKey(record.Key)
		if err != nil {
			log.problems = appendProblem(log.problems, record, err)
			continue
		}
		fold := log.role(key.Role)
		arrived = arrived || !fold.touched
		fold.apply(record, key, seen)
		touched[fold] = struct{}{}
	}
	for fold := range touched {
		fold.builder.compact()
		r.publish(log, fold)
	}
	if arrived {
		r.publishRoles()
	}
	log.wake()
}

// publish pushes a role's view to its subscribers and has its newest token
// checked. mu is held.
func (r *reader) publish(log *partitionLog, fold *roleFold) {
	if len(fold.subscribers) == 0 {
		return
	}
	for _, sub := range fold.subscribers {
		sub.push(r.view(log, fold, sub.self))
	}
	r.verifyHead(log, fold)
}

// verifyHead starts the check of the newest token of a role with its
// coordinator, if it was not checked yet. mu is held.
func (r *reader) verifyHead(log *partitionLog, fold *roleFold) {
	head := fold.head()
	if head == nil || head.trust != trustEvidence || fold.verifying || r.ctx.Err() != nil {
		return
	}
	fold.verifying = true
	token := head.token
	r.wg.Go(func() {
		status, err := r.ask(fold.role)
		r.mu.Lock()
		defer r.mu.Unlock()
		fold.verifying = false
		if err == nil {
			fold.settle(token, confirmsToken(status, token), log.partition)
		} else {
			// It cannot be asked: what the batch says counts.
			fold.accept(token)
		}
		r.publish(log, fold)
		log.wake()
	})
}

// ask is a describe that waits for one of a few slots, and not for long.
func (r *reader) ask(role Role) (LeadershipStatus, error) {
	select {
	case r.verify <- struct{}{}:
		defer func() { <-r.verify }()
	case <-r.ctx.Done():
		return LeadershipStatus{}, r.ctx.Err()
	}
	ctx, cancel := context.WithTimeout(r.ctx, min(r.transport.config.requestTimeout, time.Second))
	defer cancel()
	return r.transport.Describe(ctx, role)
}

// view makes the view of a subscriber. mu is held.
func (r *reader) view(log *partitionLog, fold *roleFold, self MemberID) RoleView {
	view := fold.view(self)
	view.ClusterID = r.topic.clusterID
	view.Position = log.position
	view.Problems = append(slices.Clone(log.problems), fold.problems...)
	view.Err = r.err
	return view
}

// watchTopic notices that the topic is no longer the one that was read.
func (r *reader) watchTopic() {
	ticker := time.NewTicker(topicCheckInterval)
	defer ticker.Stop()
	missing := false
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-ticker.C:
		case <-r.recheck:
		}
		ctx, cancel := context.WithTimeout(r.ctx, r.transport.config.requestTimeout)
		now, err := describeTopic(ctx, r.transport.kadm, r.topic.name)
		cancel()
		switch {
		case err == nil:
			missing = false
			if change := r.topic.changed(now); change != nil {
				r.transport.config.logger.Error("the state topic changed under running members", "error", change)
				r.fail(change)
				return
			}
		case errors.Is(err, kerr.UnknownTopicOrPartition):
			if missing {
				r.fail(fmt.Errorf("%w: topic %s was deleted: restart the members once it is as intended", ErrTopicChanged, r.topic.name))
				return
			}
			missing = true
			select {
			case <-r.ctx.Done():
				return
			case <-time.After(missingFor):
			}
			select {
			case r.recheck <- struct{}{}:
			default:
			}
		}
	}
}

// follow subscribes to a role.
func (r *reader) follow(role Role, self MemberID) (*subscription, error) {
	partition, err := RolePartition(role, r.topic.partitions)
	if err != nil {
		return nil, err
	}
	sub := &subscription{reader: r, role: role, self: self, views: make(chan RoleView, 1)}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil, r.err
	}
	log := r.log(partition)
	sub.log = log
	sub.fold = log.role(role)
	sub.fold.subscribers = append(sub.fold.subscribers, sub)
	if sub.fold.touched {
		sub.push(r.view(log, sub.fold, self))
		r.verifyHead(log, sub.fold)
	}
	return sub, nil
}

// log returns the fold of a partition, and begins to read it. mu is held.
func (r *reader) log(partition int32) *partitionLog {
	log := r.logs[partition]
	if log == nil {
		log = &partitionLog{partition: partition, roles: make(map[Role]*roleFold), changed: make(chan struct{})}
		r.logs[partition] = log
		// AddConsumePartitions does no I/O of its own.
		r.consumer.AddConsumePartitions(map[string]map[int32]kgo.Offset{
			r.topic.name: {partition: kgo.NewOffset().AtStart()},
		})
	}
	return log
}

// followAll lists the roles of all partitions, until ctx ends.
func (r *reader) followAll(ctx context.Context) (<-chan RoleList, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err != nil {
		return nil, r.err
	}
	var logs []*partitionLog
	for partition := range r.topic.partitions {
		logs = append(logs, r.log(partition))
	}
	lists := make(chan RoleList, 1)
	r.wg.Go(func() {
		if !r.replay(ctx, logs) {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		r.listers = append(r.listers, lists)
		r.publishRoles()
		context.AfterFunc(ctx, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.listers = slices.DeleteFunc(r.listers, func(l chan RoleList) bool { return l == lists })
		})
	})
	return lists, nil
}

// replay waits until partitions were read to their present end, and reports whether
// there is anybody left to tell.
func (r *reader) replay(ctx context.Context, logs []*partitionLog) bool {
	reading, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	for _, log := range logs {
		for attempt := 1; ; attempt++ {
			stable, _, err := r.ends(reading, log.partition)
			if err == nil {
				err = r.awaitPosition(reading, log, stable)
			}
			if err == nil {
				break
			}
			if permanent(err) || sleep(reading, retryBackoff(attempt)) != nil {
				return ctx.Err() == nil // the reader has an error to tell
			}
		}
	}
	return true
}

// publishRoles sends the roles that were seen to those who list them. mu is held.
func (r *reader) publishRoles() {
	if len(r.listers) == 0 {
		return
	}
	var roles []Role
	for _, log := range r.logs {
		for role, fold := range log.roles {
			if fold.touched {
				roles = append(roles, role)
			}
		}
	}
	slices.SortFunc(roles, func(a, b Role) int { return strings.Compare(a.String(), b.String()) })
	for _, lists := range r.listers {
		select {
		case <-lists:
		default:
		}
		lists <- RoleList{Roles: slices.Clone(roles), Err: r.err}
	}
}

func (r *reader) unfollow(sub *subscription) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := slices.Index(sub.fold.subscribers, sub)
	if i < 0 {
		return
	}
	// The partition is read on: the next one who asks need not wait for the
	// replay.
	sub.fold.subscribers = slices.Delete(sub.fold.subscribers, i, i+1)
}

// barrier waits until everything that was stable when it was called is folded,
// and reads what is not stable yet.
func (r *reader) barrier(ctx context.Context, sub *subscription) (RoleView, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	view, err := r.readToEnd(ctx, sub)
	r.mu.Lock()
	defer r.mu.Unlock()
	return view, cmp.Or(r.err, err) // a failure of the reader ended the rest
}

func (r *reader) readToEnd(ctx context.Context, sub *subscription) (RoleView, error) {
	stable, end, err := r.ends(ctx, sub.log.partition)
	if err != nil {
		return RoleView{}, err
	}
	if err := r.awaitPosition(ctx, sub.log, stable); err != nil {
		return RoleView{}, err
	}
	var tail rawTail
	if end > stable {
		if tail, err = r.rawFetch(ctx, sub.log.partition, stable, end, kgo.ReadUncommitted()); err != nil {
			return RoleView{}, err
		}
	}
	if err := r.await(ctx, sub.log, func() bool { return !sub.fold.verifying }); err != nil {
		return RoleView{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	view := r.view(sub.log, sub.fold, sub.self)
	if end > stable && tail.unstable {
		sub.fold.overlay(&view, tail, sub.self, time.Now())
	}
	return view, nil
}

// ends asks for the last stable offset and the high watermark of a partition. It
// lists offsets instead of taking those of a fetch: a leader that has just moved
// knows that its own are not to be believed yet, and says so only there (KIP-207).
func (r *reader) ends(ctx context.Context, partition int32) (stable, end int64, err error) {
	err = r.fromLeader(ctx, partition, func(leader int32) error {
		var (
			other   sync.WaitGroup
			endsErr error
		)
		other.Go(func() { end, endsErr = r.listOffset(ctx, leader, partition, kgo.ReadUncommitted()) })
		var err error
		stable, err = r.listOffset(ctx, leader, partition, kgo.ReadCommitted())
		other.Wait()
		return errors.Join(err, endsErr)
	})
	if err != nil {
		return 0, 0, fmt.Errorf("ask for the end of %s/%d: %w", r.topic.name, partition, err)
	}
	return stable, max(end, stable), nil
}

// listOffset asks a broker for the end of a partition: the last stable offset, or
// the high watermark.
func (r *reader) listOffset(ctx context.Context, leader, partition int32, isolation kgo.IsolationLevel) (int64, error) {
	part := kmsg.NewListOffsetsRequestTopicPartition()
	part.Partition = partition
	part.Timestamp = -1 // the end
	part.CurrentLeaderEpoch = -1
	topic := kmsg.NewListOffsetsRequestTopic()
	topic.Topic = r.topic.name
	topic.Partitions = append(topic.Partitions, part)
	request := kmsg.NewPtrListOffsetsRequest()
	request.ReplicaID = -1
	if isolation == kgo.ReadCommitted() {
		request.IsolationLevel = 1
	}
	request.Topics = append(request.Topics, topic)

	answer, err := r.transport.admin.Broker(int(leader)).Request(ctx, request)
	if err != nil {
		return 0, err
	}
	response, ok := answer.(*kmsg.ListOffsetsResponse)
	if !ok || len(response.Topics) != 1 || len(response.Topics[0].Partitions) != 1 {
		return 0, errors.New("the broker's answer names another partition")
	}
	found := response.Topics[0].Partitions[0]
	return found.Offset, kerr.ErrorForCode(found.ErrorCode)
}

// awaitPosition waits until the fold has reached an offset. Where the pushed
// tail stays behind, the log itself tells whether anything is left to come.
func (r *reader) awaitPosition(ctx context.Context, log *partitionLog, offset int64) error {
	wait := barrierGrace
	for {
		graceful, cancel := context.WithTimeout(ctx, wait)
		err := r.await(graceful, log, func() bool { return log.position >= offset })
		cancel()
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		r.mu.Lock()
		from := log.position
		r.mu.Unlock()
		left, err := r.rawFetch(ctx, log.partition, from, offset, kgo.ReadCommitted())
		if err != nil {
			return err
		}
		if len(left.records) == 0 && left.next >= offset {
			r.mu.Lock()
			log.position = max(log.position, offset)
			log.wake()
			r.mu.Unlock()
			return nil
		}
		wait = r.transport.config.fetchMaxWait
	}
}

// await waits for a condition on a log, which is evaluated with mu held.
func (r *reader) await(ctx context.Context, log *partitionLog, done func() bool) error {
	for {
		r.mu.Lock()
		ok, err, changed := done(), r.err, log.changed
		r.mu.Unlock()
		if err != nil {
			return err
		}
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for the log of %s/%d: %w", r.topic.name, log.partition, ctx.Err())
		}
	}
}

// A rawTail is what a raw fetch found.
type rawTail struct {
	records  []*kgo.Record
	next     int64 // everything below it was seen
	unstable bool  // the last stable offset is still where the fetch began
}

// rawFetch reads a partition from one offset up to another, outside the consumer.
func (r *reader) rawFetch(ctx context.Context, partition int32, from, to int64, isolation kgo.IsolationLevel) (rawTail, error) {
	tail := rawTail{next: from, unstable: true}
	for tail.next < to {
		answer, err := r.fetch(ctx, partition, tail.next, isolation)
		if err != nil {
			return tail, fmt.Errorf("read %s/%d at %d: %w", r.topic.name, partition, tail.next, err)
		}
		if answer.LastStableOffset > from {
			tail.unstable = false
		}
		processed, next := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
			KeepControlRecords: true,
			Offset:             tail.next,
			IsolationLevel:     isolation,
			Topic:              r.topic.name,
			Partition:          partition,
		}, answer, kgo.DefaultDecompressor(), nil)
		if processed.Err != nil {
			return tail, fmt.Errorf("read %s/%d at %d: %w", r.topic.name, partition, tail.next, processed.Err)
		}
		for _, record := range processed.Records {
			if record.Offset < to {
				tail.records = append(tail.records, record)
			}
		}
		end := answer.HighWatermark
		if isolation == kgo.ReadCommitted() {
			end = answer.LastStableOffset
		}
		if next > tail.next {
			tail.next = next
			continue
		}
		if end >= to {
			// Nothing more to read: what is left of the range is holes.
			tail.next = to
			break
		}
		// A leader that has just moved does not know yet how far it may show.
		if wait := sleep(ctx, barrierGrace); wait != nil {
			return tail, fmt.Errorf("read %s/%d at %d: %w", r.topic.name, partition, tail.next, wait)
		}
	}
	return tail, nil
}

// fetch asks the leader of a partition for what it has from an offset on.
func (r *reader) fetch(ctx context.Context, partition int32, from int64, isolation kgo.IsolationLevel) (answer *kmsg.FetchResponseTopicPartition, err error) {
	err = r.fromLeader(ctx, partition, func(leader int32) error {
		answer, err = r.fetchFrom(ctx, leader, partition, from, isolation)
		return err
	})
	return answer, err
}

// fromLeader asks the leader of a partition something, and asks again, while leaders
// move, until ctx ends.
func (r *reader) fromLeader(ctx context.Context, partition int32, ask func(leader int32) error) error {
	for attempt := 1; ; attempt++ {
		leader, err := r.leader(ctx, partition)
		if err == nil {
			err = ask(leader)
		}
		r.mu.Lock()
		if err == nil {
			r.leaders[partition] = leader
		} else {
			delete(r.leaders, partition)
		}
		r.mu.Unlock()
		if err == nil {
			return nil
		}
		if err = explain(err); permanent(err) || errors.Is(err, kgo.ErrClientClosed) {
			return err
		}
		if wait := sleep(ctx, retryBackoff(attempt)); wait != nil {
			return fmt.Errorf("%w: %w", wait, err)
		}
	}
}

// leader returns the broker that answered last for a partition, and looks its leader
// up if there is none.
func (r *reader) leader(ctx context.Context, partition int32) (int32, error) {
	r.mu.Lock()
	leader, known := r.leaders[partition]
	r.mu.Unlock()
	if known {
		return leader, nil
	}
	metadata, err := r.transport.kadm.Metadata(ctx, r.topic.name)
	if err != nil {
		return 0, fmt.Errorf("find the leader: %w", err)
	}
	found, ok := metadata.Topics[r.topic.name].Partitions[partition]
	if !ok || found.Leader < 0 {
		return 0, fmt.Errorf("find the leader: %w", kerr.LeaderNotAvailable)
	}
	return found.Leader, nil
}

func (r *reader) fetchFrom(ctx context.Context, leader, partition int32, from int64, isolation kgo.IsolationLevel) (*kmsg.FetchResponseTopicPartition, error) {
	part := kmsg.NewFetchRequestTopicPartition()
	part.Partition = partition
	part.FetchOffset = from
	part.PartitionMaxBytes = r.transport.config.fetchPartitionMax
	part.CurrentLeaderEpoch = -1
	topic := kmsg.NewFetchRequestTopic()
	topic.Topic = r.topic.name
	topic.TopicID = r.topic.id
	topic.Partitions = append(topic.Partitions, part)
	request := kmsg.NewPtrFetchRequest()
	request.MaxBytes = r.transport.config.fetchPartitionMax
	request.SessionEpoch = -1
	if isolation == kgo.ReadCommitted() {
		request.IsolationLevel = 1
	}
	request.Topics = append(request.Topics, topic)

	answer, err := r.transport.admin.Broker(int(leader)).Request(ctx, request)
	if err != nil {
		return nil, err
	}
	response, ok := answer.(*kmsg.FetchResponse)
	if !ok {
		return nil, fmt.Errorf("the broker answered a fetch with %T", answer)
	}
	if err := kerr.ErrorForCode(response.ErrorCode); err != nil {
		return nil, err
	}
	if len(response.Topics) != 1 || len(response.Topics[0].Partitions) != 1 {
		return nil, errors.New("the broker's answer names another partition")
	}
	found := &response.Topics[0].Partitions[0]
	if errors.Is(kerr.ErrorForCode(found.ErrorCode), kerr.OffsetOutOfRange) && found.LogStartOffset > from {
		return r.fetchFrom(ctx, leader, partition, found.LogStartOffset, isolation)
	}
	return found, kerr.ErrorForCode(found.ErrorCode)
}

func (log *partitionLog) wake() {
	close(log.changed)
	log.changed = make(chan struct{})
}

func (log *partitionLog) role(role Role) *roleFold {
	fold := log.roles[role]
	if fold == nil {
		fold = &roleFold{role: role, builder: NewRoleStateBuilder(role)}
		log.roles[role] = fold
	}
	return fold
}

// A subscription is one follower of a role.
type subscription struct {
	reader *reader
	log    *partitionLog
	fold   *roleFold
	role   Role
	self   MemberID
	views  chan RoleView
	once   sync.Once
}

func (s *subscription) Views() <-chan RoleView { return s.views }

func (s *subscription) Barrier(ctx context.Context) (RoleView, error) {
	return s.reader.barrier(ctx, s)
}

func (s *subscription) Close() {
	s.once.Do(func() {
		s.reader.unfollow(s)
		if s.self != (MemberID{}) {
			s.reader.transport.departed()
		}
	})
}

func (s *subscription) LastContact() time.Time { return s.reader.lastContact() }

// push replaces the view that waits to be received. The reader's mu makes it the
// only sender.
func (s *subscription) push(view RoleView) {
	select {
	case <-s.views:
	default:
	}
	s.views <- view
}

// isCommitMarker reports whether a control record commits its transaction.
func isCommitMarker(record *kgo.Record) bool {
	return record.Attrs.IsControl() && len(record.Key) >= 4 && binary.BigEndian.Uint16(record.Key[2:]) == 1
}
