package coordination

import (
	"context"
	"errors"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// writtenAt is where a record of an unknown transaction is, if it is.
type writtenAt struct {
	topic     string
	partition int32
	offset    int64
}

// evidence lists where the records of a transaction were written: one for each
// partition is enough, since they are committed together.
func evidence(batches ...[]*kgo.Record) []writtenAt {
	type place struct {
		topic     string
		partition int32
	}
	seen := make(map[place]bool)
	var written []writtenAt
	for _, records := range batches {
		for _, r := range records {
			if p := (place{r.Topic, r.Partition}); !seen[p] {
				seen[p] = true
				written = append(written, writtenAt{r.Topic, r.Partition, r.Offset})
			}
		}
	}
	return written
}

// resolveAttempts is how often a topic has to be missing before it counts as
// deleted.
const resolveAttempts = 10

// A finding is what is known of an unknown transaction.
type finding int

const (
	findingOpen    finding = iota // it was not ended; it may still go either way
	findingEnding                 // it is being ended; a coordinator that fails may forget that
	findingSettled                // it has ended, and the log tells how
)

// findingOf says what the coordinator's state of a role tells about the last
// transaction under a token.
func findingOf(token FencingToken, status LeadershipStatus) finding {
	described, ok := status.Token()
	if !ok || described != token {
		// A newer epoch settled it first. (Nothing runs under a token after
		// an unknown commit.)
		return findingSettled
	}
	switch status.State {
	case TransactionOngoing:
		return findingOpen
	case TransactionPrepareCommit, TransactionPrepareAbort, TransactionPrepareEpochFence:
		return findingEnding
	}
	return findingSettled
}

// resolve settles the outcome of a commit that went unanswered.
func (t *BrokerTransport) resolve(ctx context.Context, role Role, token FencingToken, written []writtenAt) (bool, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-t.closed:
			cancel(ErrClosed)
		case <-ctx.Done():
		}
	}()
	client, err := kgo.NewClient(t.options(kgo.MaxVersions(pinnedVersions()))...)
	if err != nil {
		return false, err
	}
	defer client.Close()
	for attempt := 1; ; attempt++ {
		status, err := t.Describe(ctx, role)
		if err == nil {
			switch findingOf(token, status) {
			case findingSettled:
				committed, proof, err := t.readOutcome(ctx, token, written)
				if err == nil && !proof {
					return committedBy(token, status)
				}
				return committed, err
			case findingOpen:
				// Committing is what was asked for, and the epoch is still
				// the newest: ask again.
				err = commitAgain(ctx, client, role, token)
			}
		}
		if errors.Is(err, ErrClosed) {
			return false, err
		}
		if wait := sleep(ctx, retryBackoff(attempt)); wait != nil {
			return false, errors.Join(wait, err)
		}
	}
}

// committedBy is the coordinator's word on the last transaction under a token, for
// where the log cannot tell any more.
func committedBy(token FencingToken, status LeadershipStatus) (bool, error) {
	if described, _ := status.Token(); described == token {
		switch status.State {
		case TransactionCompleteCommit:
			return true, nil
		case TransactionCompleteAbort:
			return false, nil
		}
	}
	return false, errors.New("the records are not in the log, but compaction or retention may have removed them")
}

// commitAgain repeats the commit request. Even its success is no proof yet: see
// findingEnding.
func commitAgain(ctx context.Context, client *kgo.Client, role Role, token FencingToken) error {
	request := kmsg.NewPtrEndTxnRequest()
	request.TransactionalID = role.String()
	request.ProducerID, request.ProducerEpoch = token.ProducerID(), token.ProducerEpoch()
	request.Commit = true
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(response.ErrorCode)
}

// readOutcome looks into the log, past which the transaction is settled, for one of
// its records. Presence proves that it was committed; absence that it was not, unless
// the record could have been removed since.
func (t *BrokerTransport) readOutcome(ctx context.Context, token FencingToken, written []writtenAt) (committed, proof bool, err error) {
	for _, at := range written {
		present, removable, err := t.readRecord(ctx, token, at)
		if err != nil {
			return false, false, err
		}
		if present {
			return true, true, nil
		}
		proof = proof || !removable
	}
	return false, proof, nil
}

// readRecord reports whether a committed record is at an offset, and, if none is,
// whether one could have been removed.
func (t *BrokerTransport) readRecord(ctx context.Context, token FencingToken, at writtenAt) (present, removable bool, err error) {
	client, err := kgo.NewClient(t.options(
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{at.topic: {at.partition: kgo.NewOffset().At(at.offset)}}),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(),
	)...)
	if err != nil {
		return false, false, err
	}
	defer client.Close()
	for attempt := 1; ; attempt++ {
		stable, err := t.kadm.ListCommittedOffsets(ctx, at.topic)
		if err == nil {
			end, ok := stable.Lookup(at.topic, at.partition)
			if err = end.Err; ok && err == nil && end.Offset > at.offset {
				break
			}
		}
		if attempt > resolveAttempts && errors.Is(err, kerr.UnknownTopicOrPartition) {
			return false, true, nil // the topic is gone, and its records with it
		}
		if wait := sleep(ctx, retryBackoff(attempt)); wait != nil {
			return false, false, errors.Join(wait, err)
		}
	}
	if removable, err = t.removable(ctx, at); err != nil {
		return false, false, err
	}
	for {
		fetches := client.PollFetches(ctx)
		if ctx.Err() != nil {
			return false, false, context.Cause(ctx)
		}
		var next *kgo.Record
		fetches.EachRecord(func(r *kgo.Record) {
			if next == nil {
				next = r
			}
		})
		if next != nil {
			wrote, _ := RecordToken(next)
			return next.Offset == at.offset && !next.Attrs.IsControl() && wrote == token, removable, nil
		}
	}
}

// removable reports whether a record could have been removed from where it was
// written: by compaction, or because the log now begins after it.
func (t *BrokerTransport) removable(ctx context.Context, at writtenAt) (bool, error) {
	starts, err := t.kadm.ListStartOffsets(ctx, at.topic)
	if err != nil {
		return false, err
	}
	start, ok := starts.Lookup(at.topic, at.partition)
	if !ok || start.Err != nil || start.Offset > at.offset {
		return true, nil
	}
	configs, err := t.kadm.DescribeTopicConfigs(ctx, at.topic)
	if err != nil {
		return true, nil // it cannot be told
	}
	described, err := configs.On(at.topic, nil)
	if err != nil || described.Err != nil {
		return true, nil
	}
	for _, c := range described.Configs {
		if c.Key == "cleanup.policy" {
			return c.MaybeValue() != "delete", nil
		}
	}
	return true, nil
}

// sleep waits, and returns ctx's cause if that ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}
