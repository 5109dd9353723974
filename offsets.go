package coordination

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// addOffsets adds the offsets of consumer groups to the open transaction. kgo does
// that only for a group that it consumes with itself; here the requests are made by
// hand, under the same epoch.
func (t *brokerTerm) addOffsets(ctx context.Context, groups []GroupOffsets) error {
	for _, group := range groups {
		if err := t.addGroup(ctx, group.Group); err != nil {
			return fmt.Errorf("add group %s to the transaction: %w", group.Group, explain(err))
		}
		t.offsetsAdded = true
		if err := t.commitGroup(ctx, group); err != nil {
			return fmt.Errorf("commit offsets of group %s: %w", group.Group, explain(err))
		}
	}
	return nil
}

func (t *brokerTerm) addGroup(ctx context.Context, group string) error {
	request := kmsg.NewPtrAddOffsetsToTxnRequest()
	request.TransactionalID = t.role.String()
	request.ProducerID, request.ProducerEpoch = t.token.ProducerID(), t.token.ProducerEpoch()
	request.Group = group
	return t.whileBusy(ctx, func() error {
		response, err := request.RequestWith(ctx, t.client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(response.ErrorCode)
	})
}

func (t *brokerTerm) commitGroup(ctx context.Context, group GroupOffsets) error {
	request := kmsg.NewPtrTxnOffsetCommitRequest()
	request.TransactionalID = t.role.String()
	request.ProducerID, request.ProducerEpoch = t.token.ProducerID(), t.token.ProducerEpoch()
	request.Group = group.Group
	request.MemberID, request.Generation = group.Member, group.Generation
	for topic, partitions := range group.Offsets {
		part := kmsg.NewTxnOffsetCommitRequestTopic()
		part.Topic = topic
		for _, offset := range partitions {
			p := kmsg.NewTxnOffsetCommitRequestTopicPartition()
			p.Partition, p.Offset, p.LeaderEpoch = offset.Partition, offset.At, offset.LeaderEpoch
			if offset.Metadata != "" {
				p.Metadata = kmsg.StringPtr(offset.Metadata)
			}
			part.Partitions = append(part.Partitions, p)
		}
		request.Topics = append(request.Topics, part)
	}
	return t.whileBusy(ctx, func() error {
		response, err := request.RequestWith(ctx, t.client)
		if err != nil {
			return err
		}
		for _, topic := range response.Topics {
			for _, partition := range topic.Partitions {
				if err := kerr.ErrorForCode(partition.ErrorCode); err != nil {
					return fmt.Errorf("%s/%d: %w", topic.Topic, partition.Partition, err)
				}
			}
		}
		return nil
	})
}

// abortByHand ends a transaction that kgo does not know of.
func (t *brokerTerm) abortByHand(ctx context.Context) error {
	request := kmsg.NewPtrEndTxnRequest()
	request.TransactionalID = t.role.String()
	request.ProducerID, request.ProducerEpoch = t.token.ProducerID(), t.token.ProducerEpoch()
	return t.whileBusy(ctx, func() error {
		response, err := request.RequestWith(ctx, t.client)
		if err != nil {
			return err
		}
		return kerr.ErrorForCode(response.ErrorCode)
	})
}

// whileBusy repeats a request while the coordinator finishes the transaction
// before, or moves.
func (t *brokerTerm) whileBusy(ctx context.Context, request func() error) error {
	ctx, cancel := context.WithTimeout(ctx, t.config.StallTimeout)
	defer cancel()
	for attempt := 1; ; attempt++ {
		err := request()
		busy := errors.Is(err, kerr.ConcurrentTransactions) || kerr.IsRetriable(err)
		if err == nil || !busy || errors.Is(err, kerr.UnknownTopicOrPartition) {
			return err
		}
		if wait := sleep(ctx, retryBackoff(attempt)); wait != nil {
			return fmt.Errorf("%w: %w", wait, err)
		}
	}
}

// describeWritable asks which topics exist and may be written to. It returns why
// not, for those that do not or may not.
func describeWritable(ctx context.Context, client *kgo.Client, topics []string) (map[string]error, error) {
	refused := make(map[string]error)
	request := kmsg.NewPtrMetadataRequest()
	request.IncludeTopicAuthorizedOperations = true
	for _, topic := range topics {
		t := kmsg.NewMetadataRequestTopic()
		t.Topic = kmsg.StringPtr(topic)
		request.Topics = append(request.Topics, t)
	}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return refused, err
	}
	answered := make(map[string]bool)
	for _, topic := range response.Topics {
		if topic.Topic == nil {
			continue
		}
		name := *topic.Topic
		answered[name] = true
		err := kerr.ErrorForCode(topic.ErrorCode)
		switch {
		case errors.Is(err, kerr.UnknownTopicOrPartition):
			refused[name] = fmt.Errorf("topic %q does not exist: create it: %w", name, err)
			continue
		case errors.Is(err, kerr.TopicAuthorizationFailed):
			refused[name] = mayNotWrite(name)
			continue
		case err != nil && !kerr.IsRetriable(err):
			refused[name] = fmt.Errorf("topic %q: %w", name, explain(err))
			continue
		case err != nil:
			continue // its leader is being elected
		}
		// A broker that does not tell leaves the field at its minimum.
		if told := topic.AuthorizedOperations; told != math.MinInt32 &&
			!slices.Contains(kadm.DecodeACLOperations(told), kmsg.ACLOperationWrite) {
			refused[name] = mayNotWrite(name)
		}
	}
	for _, topic := range topics {
		if !answered[topic] {
			refused[topic] = fmt.Errorf("topic %q: %w", topic, kerr.UnknownTopicOrPartition)
		}
	}
	return refused, nil
}

func mayNotWrite(topic string) error {
	return invalidConfig("grant Write on topic %q: %w", topic, kerr.TopicAuthorizationFailed)
}
