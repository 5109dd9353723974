//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// zombieValue is what the zombie tries to write.
const zombieValue = "written by a zombie"

// insist is what no service does: it writes on after the end, under the old token
// and past the library. It stands for a bug, or for requests that the network held
// back while the process was paused. What the brokers answer is reported.
func insist(s settings, token coordination.FencingToken) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	e := event{Kind: insisted, Token: token}
	opened, produced, err := writeUnder(ctx, s, token)
	if err != nil {
		e.Text = err.Error()
	} else {
		e.Refused = opened != nil && produced != nil
		e.Text = fmt.Sprintf("AddPartitionsToTxn with %s, Produce with %s", name(opened), name(produced))
	}
	report(e)
}

func name(err error) string {
	if known, ok := errors.AsType[*kerr.Error](err); ok {
		return known.Message
	}
	return "success"
}

// writeUnder asks the coordinator for a transaction under a token, and the leader
// of the ledger to append to it. It returns their error codes.
func writeUnder(ctx context.Context, s settings, token coordination.FencingToken) (opened, produced, err error) {
	// These are the last versions of the transaction protocol that a leadership
	// uses.
	versions := kversion.Stable()
	versions.SetMaxKeyVersion(int16(kmsg.Produce), 11)
	versions.SetMaxKeyVersion(int16(kmsg.AddPartitionsToTxn), 3)
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.MaxVersions(versions))
	if err != nil {
		return nil, nil, err
	}
	defer client.Close()

	add := kmsg.NewPtrAddPartitionsToTxnRequest()
	add.TransactionalID = s.role
	add.ProducerID, add.ProducerEpoch = token.ProducerID(), token.ProducerEpoch()
	added := kmsg.NewAddPartitionsToTxnRequestTopic()
	added.Topic, added.Partitions = s.topic, []int32{0}
	add.Topics = append(add.Topics, added)
	answered, err := add.RequestWith(ctx, client)
	if err != nil {
		return nil, nil, err
	}
	if len(answered.Topics) != 1 || len(answered.Topics[0].Partitions) != 1 {
		return nil, nil, fmt.Errorf("the coordinator answered something else: %v", answered)
	}

	topics, err := kadm.NewClient(client).ListTopics(ctx, s.topic)
	if err != nil {
		return nil, nil, err
	}
	partition := kmsg.NewProduceRequestTopicPartition()
	partition.Records = batch(token, zombieValue)
	topic := kmsg.NewProduceRequestTopic()
	topic.Topic = s.topic
	topic.Partitions = append(topic.Partitions, partition)
	produce := kmsg.NewPtrProduceRequest()
	produce.TransactionID = &s.role
	produce.Acks = -1
	produce.TimeoutMillis = 5000
	produce.Topics = append(produce.Topics, topic)
	response, err := client.Broker(int(topics[s.topic].Partitions[0].Leader)).Request(ctx, produce)
	if err != nil {
		return nil, nil, err
	}
	answer, ok := response.(*kmsg.ProduceResponse)
	if !ok || len(answer.Topics) != 1 || len(answer.Topics[0].Partitions) != 1 {
		return nil, nil, fmt.Errorf("the broker answered something else: %v", response)
	}
	return kerr.ErrorForCode(answered.Topics[0].Partitions[0].ErrorCode),
		kerr.ErrorForCode(answer.Topics[0].Partitions[0].ErrorCode), nil
}

// batch encodes a transactional batch of one record.
func batch(token coordination.FencingToken, value string) []byte {
	record := kmsg.NewRecord()
	record.Value = []byte(value)
	record.Length = int32(len(record.AppendTo(nil)) - 1) // without its own byte
	now := time.Now().UnixMilli()
	b := kmsg.NewRecordBatch()
	b.Magic = 2
	b.Attributes = 1 << 4 // transactional
	b.FirstTimestamp, b.MaxTimestamp = now, now
	b.ProducerID, b.ProducerEpoch = token.ProducerID(), token.ProducerEpoch()
	b.NumRecords = 1
	b.Records = record.AppendTo(nil)
	encoded := b.AppendTo(nil)
	b.Length = int32(len(encoded) - 12) // what follows the length
	b.CRC = int32(crc32.Checksum(b.AppendTo(nil)[21:], crc32.MakeTable(crc32.Castagnoli)))
	return b.AppendTo(nil)
}
