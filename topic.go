package coordination

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
)

// tailBound is how long the state topic keeps what compaction may drop. Kafka's
// defaults keep the commit marker of every renewal for a day.
const tailBound = 10 * time.Minute

// stateTopic is what a transport knows of the topic it uses. It is immutable: a
// topic with another id or partition count is another topic.
type stateTopic struct {
	name       string
	id         kadm.TopicID
	partitions int32
	clusterID  string
	led        bool // every partition has a leader
}

// topicConfigs are the settings of a state topic that is created here.
func topicConfigs(replication int16) map[string]*string {
	bound := strconv.FormatInt(tailBound.Milliseconds(), 10)
	minISR := "1"
	if replication > 2 {
		minISR = strconv.Itoa(int(replication) - 1)
	}
	configs := map[string]string{
		"cleanup.policy": "compact",
		// The broker's clock in every record: a member that starts learns
		// the age of a lease from it.
		"message.timestamp.type": "LogAppendTime",
		// Together these bound the replay: only closed segments are
		// compacted, and markers go when delete.retention.ms has passed.
		"segment.ms":            bound,
		"max.compaction.lag.ms": bound,
		"delete.retention.ms":   bound,
		// A replica that lags must not take acknowledged leases back.
		"unclean.leader.election.enable": "false",
		"min.insync.replicas":            minISR,
	}
	pointers := make(map[string]*string, len(configs))
	for name, value := range configs {
		pointers[name] = &value
	}
	return pointers
}

// describeTopic looks the topic up, without creating it.
func describeTopic(ctx context.Context, admin *kadm.Client, name string) (stateTopic, error) {
	metadata, err := admin.Metadata(ctx, name)
	if err != nil {
		return stateTopic{}, fmt.Errorf("look up topic %s: %w", name, explain(err))
	}
	detail, ok := metadata.Topics[name]
	if !ok {
		return stateTopic{}, fmt.Errorf("look up topic %s: %w", name, kerr.UnknownTopicOrPartition)
	}
	if detail.Err != nil {
		return stateTopic{}, fmt.Errorf("look up topic %s: %w", name, explain(detail.Err))
	}
	topic := stateTopic{
		name:       name,
		id:         detail.ID,
		partitions: int32(len(detail.Partitions)),
		clusterID:  metadata.Cluster,
		led:        true,
	}
	for _, partition := range detail.Partitions {
		topic.led = topic.led && partition.Leader >= 0
	}
	return topic, nil
}

// createTopic creates the state topic, unless somebody else was faster.
func createTopic(ctx context.Context, admin *kadm.Client, c brokerConfig) (created bool, err error) {
	answer, err := admin.CreateTopic(ctx, c.partitions, c.replication, topicConfigs(c.replication), c.topic)
	if err == nil {
		err = answer.Err
	}
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, kerr.TopicAlreadyExists):
		return false, nil
	case errors.Is(err, kerr.InvalidReplicationFactor):
		return false, invalidConfig("create topic %s with %d replicas: the cluster has fewer brokers: use WithReplication, or add brokers: %w", c.topic, c.replication, err)
	case errors.Is(err, kerr.PolicyViolation), errors.Is(err, kerr.InvalidConfig), errors.Is(err, kerr.InvalidTopicException),
		errors.Is(err, kerr.InvalidPartitions):
		return false, invalidConfig("create topic %s: the cluster refuses it: create it by hand and use WithTopicCreation(false): %w: %s", c.topic, err, answer.ErrMessage)
	case errors.Is(err, kerr.TopicAuthorizationFailed), errors.Is(err, kerr.ClusterAuthorizationFailed):
		return false, invalidConfig("create topic %s: not authorized: grant Create on the topic, or create it by hand: %w", c.topic, err)
	default:
		return false, fmt.Errorf("create topic %s: %w", c.topic, err)
	}
}

// checkTopic reads the settings of a topic that exists and refuses those that
// break correctness. It returns warnings for those that only cost something.
func checkTopic(ctx context.Context, admin *kadm.Client, name string) (warnings []string, err error) {
	described, err := admin.DescribeTopicConfigs(ctx, name)
	if err == nil {
		var rc kadm.ResourceConfig
		if rc, err = described.On(name, nil); err == nil {
			err = rc.Err
		}
		if err == nil {
			return judgeTopic(name, rc.Configs)
		}
	}
	switch {
	case errors.Is(err, kerr.TopicAuthorizationFailed), errors.Is(err, kerr.ClusterAuthorizationFailed), errors.Is(err, kerr.UnsupportedVersion):
		return []string{"the settings of the topic could not be checked: grant DescribeConfigs on it"}, nil
	default:
		return nil, fmt.Errorf("read the settings of topic %s: %w", name, err)
	}
}

// judgeTopic is the rule of checkTopic.
func judgeTopic(name string, configs []kadm.Config) (warnings []string, err error) {
	for _, config := range configs {
		value := config.MaybeValue()
		switch config.Key {
		case "cleanup.policy":
			var compact bool
			for policy := range strings.SplitSeq(value, ",") {
				switch strings.TrimSpace(policy) {
				case "compact":
					compact = true
				case "delete":
					return nil, invalidConfig("topic %s has cleanup.policy=%s, which deletes leases and registrations: set it to compact", name, value)
				}
			}
			if !compact {
				return nil, invalidConfig("topic %s has cleanup.policy=%s: set it to compact", name, value)
			}
		case "message.timestamp.type":
			if value != "LogAppendTime" {
				warnings = append(warnings, "message.timestamp.type is "+value+": a member that starts waits a whole lease for a leader that died; set it to LogAppendTime")
			}
		case "unclean.leader.election.enable":
			if value == "true" {
				warnings = append(warnings, "unclean.leader.election.enable is true: a fencing number may be issued twice; set it to false")
			}
		}
	}
	return warnings, nil
}

// changed says how a topic differs from what it was, or nil.
func (t stateTopic) changed(now stateTopic) error {
	switch {
	case t.id != now.id:
		return fmt.Errorf("%w: topic %s was deleted and created again: its fencing numbers start over; restart the members once it is as intended", ErrTopicChanged, t.name)
	case t.partitions != now.partitions:
		return fmt.Errorf("%w: topic %s went from %d to %d partitions, which moves roles: restart all members", ErrTopicChanged, t.name, t.partitions, now.partitions)
	}
	return nil
}

// explain adds what to change to the errors that retrying cannot cure.
func explain(err error) error {
	var distrusted *tls.CertificateVerificationError
	if errors.As(err, &distrusted) && !errors.Is(err, ErrInvalidConfig) {
		return invalidConfig("the broker's certificate is not trusted: give kgo.DialTLSConfig the RootCAs and the ServerName that it needs: %w", err)
	}
	for _, known := range []struct {
		err    *kerr.Error
		remedy string
	}{
		{kerr.TopicAuthorizationFailed, "grant Read and Write (a member) or Read (an observer) on the topic"},
		{kerr.TransactionalIDAuthorizationFailed, "grant Write (a member) or Describe (an auditor) on the transactional id, which is the role"},
		{kerr.ClusterAuthorizationFailed, "grant Write on the topic, or IdempotentWrite on the cluster"},
		{kerr.GroupAuthorizationFailed, "grant Read on the consumer group"},
		{kerr.InvalidTransactionTimeout, "lower the renew interval or WithTransactionTimeout below the broker's transaction.max.timeout.ms"},
		{kerr.SaslAuthenticationFailed, "check the user and the password"},
		{kerr.UnsupportedSaslMechanism, "use a SASL mechanism that the listener offers"},
		{kerr.UnsupportedVersion, "use a newer broker"},
		{kerr.InvalidTopicException, "use a legal topic name"},
	} {
		if errors.Is(err, known.err) {
			if errors.Is(err, ErrInvalidConfig) {
				return err
			}
			return invalidConfig("%s: %w", known.remedy, err)
		}
	}
	return err
}
