package coordination_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/krabka-io/krabka-coordination-go/coordinationtest"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// The tests in this file run on a real Kafka. brokersEnv holds its bootstrap
// addresses, as scripts/kafka up prints them.
const brokersEnv = "COORDINATION_BROKERS"

// onKafka runs a test on the cluster that the environment names, with a role of
// its own and a lease of 1 s.
func onKafka(t *testing.T, test func(w *world)) {
	t.Helper()
	addresses := os.Getenv(brokersEnv)
	if addresses == "" {
		t.Skipf("needs a real Kafka: %s=$(scripts/kafka up) go test .", brokersEnv)
	}
	lease, err := coordination.LeaseConfigFor(time.Second)
	require.NoError(t, err)
	w := &world{
		T: t, ctx: t.Context(),
		brokers: strings.Split(addresses, ","), dial: (&net.Dialer{}).DialContext,
		role: coordination.MustRole("role-" + rand.Text()), lease: lease,
	}
	w.replication = int16(min(len(w.brokers), 3))
	test(w)
}

func (w *world) admin() *kadm.Client { return kadm.NewClient(w.client()) }

// topic creates a topic of one partition.
func (w *world) topic() string {
	w.Helper()
	name := "topic-" + rand.Text()
	_, err := w.admin().CreateTopic(w.ctx, 1, w.replication, nil, name)
	require.NoError(w, err)
	return name
}

// log reads everything that is committed in a partition up to now. It waits until
// no transaction is open in it.
func (w *world) log(topic string, partition int32) []*kgo.Record {
	w.Helper()
	var end int64
	w.await("no open transaction", func() bool {
		ends, err := w.admin().ListEndOffsets(w.ctx, topic)
		require.NoError(w, err)
		stable, err := w.admin().ListCommittedOffsets(w.ctx, topic)
		require.NoError(w, err)
		e, _ := ends.Lookup(topic, partition)
		s, _ := stable.Lookup(topic, partition)
		end = e.Offset
		return e.Offset == s.Offset
	})
	client := w.client(
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {partition: kgo.NewOffset().AtStart()}}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords(),
	)
	var records []*kgo.Record
	for next := int64(0); next < end; {
		fetches := client.PollFetches(w.ctx)
		require.NoError(w, fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			next = r.Offset + 1
			if !r.Attrs.IsControl() {
				records = append(records, r)
			}
		})
	}
	return records
}

// grants are the committed lease records of the role.
func (w *world) grants() []*kgo.Record {
	w.Helper()
	partition, err := coordination.RolePartition(w.role, 16)
	require.NoError(w, err)
	key, err := coordination.EncodeKey(coordination.LeaseKey(w.role))
	require.NoError(w, err)
	var grants []*kgo.Record
	for _, r := range w.log(coordination.StateTopic, partition) {
		if bytes.Equal(r.Key, key) && r.Value != nil {
			grants = append(grants, r)
		}
	}
	return grants
}

func (w *world) decodeLease(r *kgo.Record) coordination.Lease {
	w.Helper()
	value, err := coordination.DecodeValue(coordination.KindLease, r.Value)
	require.NoError(w, err)
	lease, ok := value.(coordination.Lease)
	require.True(w, ok)
	return lease
}

// firstGrant is the first lease of the token that came last.
func (w *world) firstGrant() (first, before *kgo.Record) {
	w.Helper()
	grants := w.grants()
	token := w.decodeLease(grants[len(grants)-1]).Token
	for i, r := range grants {
		if w.decodeLease(r).Token == token {
			require.Positive(w, i)
			return r, grants[i-1]
		}
	}
	return nil, nil
}

func TestKafkaConforms(t *testing.T) {
	onKafka(t, func(w *world) {
		coordinationtest.TestTransport(w.T, func(t *testing.T) coordination.Transport {
			transport, err := coordination.NewBrokerTransport(t.Context(), w.brokers, coordination.WithReplication(w.replication))
			require.NoError(t, err)
			t.Cleanup(transport.Close)
			return transport
		})
	})
}

func TestKafkaElectsOneOfThreeAndSurvivesItsCrash(t *testing.T) {
	onKafka(t, func(w *world) {
		leader, standbys := first(w, w.member("a"), w.member("b"), w.member("c"))
		for _, m := range standbys {
			m.await("standby", 1)
		}
		won := leader.await("leading", 1)
		leader.kill()
		next, rest := first(w, standbys...)
		took := next.await("leading", 1)
		require.NotEqual(w, won.Token, took.Token)
		require.Greater(w, took.Fence, won.Fence)
		require.Empty(w, rest[0].all("leading"))

		first, before := w.firstGrant()
		require.False(w, first.Timestamp.Before(before.Timestamp.Add(w.lease.Duration())),
			"nobody challenges before the dead leader's lease is over")

		next.leave() // hands over
		rest[0].await("leading", 1)
		rest[0].leave()
		require.Nil(w, w.view().State.Lease)
		require.Empty(w, w.view().State.Roster)
	})
}

func TestKafkaStartIntoADeadLeadersRoleWaitsForTheRestOfItsLease(t *testing.T) {
	onKafka(t, func(w *world) {
		lease, err := coordination.LeaseConfigFor(6 * time.Second)
		require.NoError(w, err)
		w.lease = lease
		dead := w.member("dead")
		dead.await("leading", 1)
		dead.kill()
		time.Sleep(lease.Duration() / 2)
		heir := w.member("heir")
		heir.await("leading", 1)
		first, before := w.firstGrant()
		waited := first.Timestamp.Sub(before.Timestamp)
		require.GreaterOrEqual(w, waited, lease.Duration())
		require.Less(w, waited, lease.Duration()*3/2, "half the lease was over when the heir started")
	})
}

func TestKafkaZombieInTheMiddleOfATransactionIsFenced(t *testing.T) {
	onKafka(t, func(w *world) {
		topic := w.topic()
		writing := func(c *memberConfig) { c.Topic, c.Writers = topic, 1 }
		zombie := w.member("zombie", writing)
		zombie.await("acked", 3)
		heir := w.member("heir", writing)
		heir.await("standby", 1)

		zombie.tell("freeze")
		zombie.stopped()
		heir.await("acked", 20)
		zombie.signal(syscall.SIGCONT)
		lost := zombie.await("lost", 1)
		require.Contains(w, []string{"fenced", "expired"}, lost.Cause)
		zombie.kill()
		heir.kill()

		w.checkLog(topic, zombie, heir)
	})
}

func TestKafkaIdleZombieIsFenced(t *testing.T) {
	onKafka(t, func(w *world) {
		topic := w.topic()
		writing := func(c *memberConfig) { c.Topic, c.Writers = topic, 1 }
		zombie := w.member("zombie", writing)
		zombie.await("acked", 3)
		heir := w.member("heir", writing)
		heir.await("standby", 1)
		for round := range 3 {
			paused, other := zombie, heir
			if round%2 == 1 {
				paused, other = heir, zombie
			}
			acked, lost := len(other.all("acked")), len(paused.all("lost"))
			paused.signal(syscall.SIGSTOP)
			other.await("acked", acked+10)
			paused.signal(syscall.SIGCONT)
			paused.await("lost", lost+1)
			paused.await("standby", round/2+1)
		}
		zombie.kill()
		heir.kill()
		w.checkLog(topic, zombie, heir)
	})
}

func TestKafkaManyWritersUnderKillAndPause(t *testing.T) {
	onKafka(t, func(w *world) {
		topic := w.topic()
		writing := func(c *memberConfig) { c.Topic, c.Writers = topic, 100 }
		standby := w.member("m0", writing)
		standby.await("acked", 1)
		members := []*member{standby}
		for i := range 6 {
			leader := standby
			standby = w.member(fmt.Sprintf("m%d", i+1), writing)
			members = append(members, standby)
			standby.await("standby", 1)
			leader.await("acked", len(leader.all("acked"))+200)
			if i%2 == 0 {
				leader.kill()
			} else {
				leader.signal(syscall.SIGSTOP)
			}
			standby.await("acked", 200)
			if i%2 == 1 {
				leader.signal(syscall.SIGCONT)
				leader.await("lost", 1)
				leader.kill()
			}
		}
		standby.kill()
		w.checkLog(topic, members...)
	})
}

func TestKafkaSurvivesChaos(t *testing.T) {
	onKafka(t, func(w *world) {
		seed := uint64(time.Now().UnixNano())
		w.Logf("seed %d", seed)
		random := mathrand.New(mathrand.NewPCG(seed, 0))
		lease, err := coordination.LeaseConfigFor(600 * time.Millisecond)
		require.NoError(w, err)
		w.lease = lease
		topic := w.topic()
		var all []*member
		start := func() *member {
			m := w.member(fmt.Sprintf("m%d", len(all)), func(c *memberConfig) { c.Topic, c.Writers = topic, 20 })
			all = append(all, m)
			return m
		}
		running := []*member{start(), start(), start(), start()}
		first(w, running...)
		for range 40 {
			i := random.IntN(len(running))
			switch m := running[i]; random.IntN(4) {
			case 0:
				m.kill()
				running[i] = start()
			case 1, 2:
				m.signal(syscall.SIGSTOP)
				time.Sleep(time.Duration(random.IntN(2000)) * time.Millisecond)
				m.signal(syscall.SIGCONT)
			default:
				time.Sleep(time.Duration(random.IntN(600)) * time.Millisecond)
			}
		}
		// Nothing is wedged: somebody still leads, or does soon.
		acked := func() (n int) {
			for _, m := range running {
				n += len(m.all("acked"))
			}
			return n
		}
		before := acked()
		w.await("writes after the chaos", func() bool { return acked() > before+100 })
		for _, m := range running {
			m.kill()
		}
		terms := 0
		for _, m := range all {
			terms += len(m.all("leading"))
		}
		w.Logf("%d members, %d terms", len(all), terms)
		w.checkLog(topic, all...)
	})
}

func TestKafkaUnknownOutcomeIsResolved(t *testing.T) {
	for name, c := range map[string]struct {
		lost      bool // the commit request; otherwise it is the answer
		successor bool // leads before the outcome is resolved
		want      bool
	}{
		"the answer is lost":                         {false, false, true},
		"the answer is lost, and another leads":      {false, true, true},
		"the request is lost, and another leads":     {true, true, false},
		"the request is lost, and it is asked again": {true, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			onKafka(t, func(w *world) {
				// No renewal comes between the calls below.
				lease, err := coordination.NewLeaseConfig(3*time.Second, 2*time.Second, 500*time.Millisecond)
				require.NoError(w, err)
				w.lease = lease
				topic := w.topic()
				a := w.machine()
				l := w.lead(a.elector("a", coordination.WithTransactionTimeout(time.Minute)))
				entry := func(value string) *kgo.Record { return &kgo.Record{Topic: topic, Value: []byte(value)} }
				require.NoError(w, l.Produce(w.ctx, entry("before")))
				var once sync.Once
				a.network.watch(func(key int16) bool {
					pass := true
					if key == int16(kmsg.EndTxn) {
						once.Do(func() {
							a.network.cut() // nothing comes back any more
							pass = !c.lost
						})
					}
					return pass
				})
				err = l.Produce(w.ctx, entry("unknown"))
				var unknown *coordination.OutcomeUnknownError
				require.ErrorAs(w, err, &unknown)
				require.ErrorIs(w, l.Err(), coordination.ErrNotHeld)
				if c.successor {
					next := w.lead(w.machine().elector("b"))
					defer func() { require.NoError(w, next.Resign(w.ctx)) }()
				}
				a.network.heal()
				committed, err := unknown.Resolve(w.ctx)
				require.NoError(w, err)
				require.Equal(w, c.want, committed)
				present := 0
				for _, r := range w.log(topic, 0) {
					if string(r.Value) == "unknown" {
						present++
					}
				}
				if c.want {
					require.Equal(w, 1, present)
				} else {
					require.Zero(w, present)
				}
			})
		})
	}
}

// checkLog holds what the members were told against what the log has: what was
// acknowledged is there once, what was refused is not, and tokens never go back.
func (w *world) checkLog(topic string, members ...*member) {
	w.Helper()
	count := make(map[string]int)
	var newest coordination.FencingToken
	for _, r := range w.log(topic, 0) {
		count[string(r.Value)]++
		text, _, _ := strings.Cut(string(r.Value), " ")
		token, err := coordination.ParseFencingToken(text)
		require.NoError(w, err)
		require.GreaterOrEqual(w, token.Compare(newest), 0, "%s after %s", token, newest)
		newest = token
	}
	acked := 0
	for _, m := range members {
		for _, e := range m.all("acked") {
			acked++
			require.Equal(w, 1, count[e.Value], "acknowledged: %s", e.Value)
		}
		for _, e := range m.all("refused") {
			require.Zero(w, count[e.Value], "refused: %s: %s", e.Value, e.Error)
		}
	}
	require.Positive(w, acked)
}

func TestKafkaRestartReclaimIsForThoseWhoAskForIt(t *testing.T) {
	onKafka(t, func(w *world) {
		lease, err := coordination.LeaseConfigFor(12 * time.Second)
		require.NoError(w, err)
		w.lease = lease
		for _, reclaim := range []bool{true, false} {
			w.role = coordination.MustRole("role-" + rand.Text())
			before := w.member("pod-0")
			before.await("leading", 1)
			standby := w.member("pod-1")
			standby.await("standby", 1)
			before.kill()
			after := w.member("pod-0", func(c *memberConfig) { c.Reclaim = reclaim })
			leader, _ := first(w, after, standby)
			granted, last := w.firstGrant()
			early := granted.Timestamp.Before(last.Timestamp.Add(lease.Duration()))
			if reclaim {
				require.Equal(w, "pod-0", leader.id)
				require.True(w, early, "the lease was not over yet")
			} else {
				require.Equal(w, "pod-1", leader.id, "the restarted member stands behind the standby")
				require.False(w, early)
			}
			after.kill()
			standby.kill()
		}
	})
}

func TestKafkaTokenIsWhatTheCoordinatorDescribes(t *testing.T) {
	onKafka(t, func(w *world) {
		lease, err := coordination.NewLeaseConfig(5*time.Second, 10*time.Millisecond, 500*time.Millisecond)
		require.NoError(w, err)
		w.lease = lease
		m := w.machine()
		l := w.lead(m.elector("a", coordination.WithTransactionTimeout(5*time.Second)))
		renewals := 0
		for last := l.Deadline(); renewals < 200; {
			require.NoError(w, l.Err())
			status, err := coordination.DescribeLeadership(w.ctx, m.transport, w.role)
			require.NoError(w, err)
			token, led := status.Token()
			require.True(w, led)
			require.Equal(w, l.Token(), token)
			if now := l.Deadline(); now.After(last) {
				last = now
				renewals++
			}
		}
		require.NoError(w, l.Resign(w.ctx))
		status, err := coordination.DescribeLeadership(w.ctx, m.transport, w.role)
		require.NoError(w, err)
		require.True(w, status.Authoritative(l.Token()), "until the next mint")
		require.GreaterOrEqual(w, len(w.grants()), 200)
	})
}

func TestKafkaOffsetsOfAConsumerThatWasReplacedAreRefused(t *testing.T) {
	onKafka(t, func(w *world) {
		input := w.topic()
		group := "group-" + rand.Text()
		l := w.lead(w.machine().elector("a"))
		consumer := func() *kgo.Client {
			return w.client(kgo.ConsumerGroup(group), kgo.ConsumeTopics(input), kgo.SessionTimeout(6*time.Second), kgo.HeartbeatInterval(100*time.Millisecond))
		}
		commit := func(at int64, of coordination.GroupOption) error {
			return l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
				offsets := make(kadm.Offsets)
				offsets.AddOffset(input, 0, at, -1)
				return tx.CommitOffsets(group, offsets, of)
			})
		}
		first := consumer()
		w.polls(first)
		var before coordination.GroupOption
		w.await("the first one to be a member", func() bool {
			member, generation := first.GroupMetadata()
			before = coordination.GroupMetadata(member, generation)
			return generation > 0 && commit(1, before) == nil
		})
		second := consumer()
		w.polls(second)
		w.await("the second one to be a member", func() bool {
			_, generation := second.GroupMetadata()
			return generation > 0
		})
		var rejected *coordination.RejectedError
		err := commit(2, before)
		require.ErrorAs(w, err, &rejected)
		require.ErrorIs(w, err, kerr.IllegalGeneration)
		require.NoError(w, l.Err())

		committed, err := l.CommittedOffsets(w.ctx, group)
		require.NoError(w, err)
		found, ok := committed.Lookup(input, 0)
		require.True(w, ok)
		require.EqualValues(w, 1, found.At)
		require.NoError(w, l.Resign(w.ctx))
	})
}

// polls has a consumer poll until the test is over.
func (w *world) polls(client *kgo.Client) {
	var polling sync.WaitGroup
	polling.Go(func() {
		for !client.PollFetches(context.Background()).IsClientClosed() {
		}
	})
	w.Cleanup(func() {
		client.Close()
		polling.Wait()
	})
}

func TestKafkaDeletedTopicCostsItsCallsAlone(t *testing.T) {
	onKafka(t, func(w *world) {
		doomed := w.topic()
		l := w.lead(w.machine().elector("a"))
		require.NoError(w, l.Produce(w.ctx, &kgo.Record{Topic: doomed, Value: []byte("x")}))
		_, err := w.admin().DeleteTopic(w.ctx, doomed)
		require.NoError(w, err)
		w.takesNothing(l, doomed)
	})
}

// The markers that end a transaction need the replicas too: one that has touched a
// partition short of them stays open, and its transactional id with it. That is the
// role, which nobody can lead then, until the replicas are back.
func TestKafkaTopicShortOfReplicasHoldsUpTheRole(t *testing.T) {
	onKafka(t, func(w *world) {
		if len(w.brokers) < 3 {
			t.Skipf("needs three nodes: %s=$(scripts/kafka up -nodes 3) go test .", brokersEnv)
		}
		short, two := "topic-"+rand.Text(), "2"
		_, err := w.admin().CreateTopic(w.ctx, 1, 2, map[string]*string{"min.insync.replicas": &two}, short)
		require.NoError(w, err)
		partition := func() kadm.PartitionDetail {
			topics, err := w.admin().ListTopics(w.ctx, short)
			require.NoError(w, err)
			return topics[short].Partitions[0]
		}
		w.await("a leader", func() bool { return len(partition().ISR) == 2 })
		victim := partition().Replicas[1]
		w.node("kill", victim)
		w.await("the end of the broker's session", func() bool { return len(partition().ISR) == 1 })
		l := w.lead(w.machine().elector("a"))
		require.Error(w, l.Produce(w.ctx, &kgo.Record{Topic: short, Value: []byte("refused")}))
		w.node("start", victim)
		// Where the leadership was lost, a successor has to get through.
		_ = l.Resign(w.ctx)
		next := w.lead(w.machine().elector("b"))
		require.NoError(w, next.Produce(w.ctx, &kgo.Record{Topic: short, Value: []byte("written")}))
		require.NoError(w, next.Resign(w.ctx))
		log := w.log(short, 0)
		require.Len(w, log, 1)
		require.Equal(w, "written", string(log[0].Value))
	})
}

// takesNothing writes to a topic that takes nothing for several leases, and beside
// it to one that is well. Nobody pays for the first one but with time.
func (w *world) takesNothing(l *coordination.Leadership, topic string) {
	w.Helper()
	well, token := w.topic(), l.Token()
	var calls sync.WaitGroup
	end := time.Now().Add(4 * w.lease.Duration())
	calls.Go(func() {
		for time.Now().Before(end) {
			err := l.Produce(w.ctx, &kgo.Record{Topic: topic, Value: []byte("x")})
			var rejected *coordination.RejectedError
			if !errors.As(err, &rejected) {
				w.Errorf("not a rejection: %v", err)
				return
			}
		}
	})
	written := make([]int, 8)
	for i := range written {
		calls.Go(func() {
			for time.Now().Before(end) {
				if err := l.Produce(w.ctx, &kgo.Record{Topic: well, Value: []byte("x")}); err != nil {
					w.Errorf("beside it: %v", err)
					return
				}
				written[i]++
			}
		})
	}
	calls.Wait()
	require.NoError(w, l.Check(w.ctx))
	require.Equal(w, token, l.Token())
	require.NoError(w, l.Resign(w.ctx))
	total := 0
	for _, n := range written {
		require.Positive(w, n)
		total += n
	}
	require.Len(w, w.log(well, 0), total)
}

func TestKafkaShortLeases(t *testing.T) {
	onKafka(t, func(w *world) {
		lease, err := coordination.LeaseConfigFor(300 * time.Millisecond)
		require.NoError(w, err)
		w.lease = lease
		standby := w.member("m0")
		standby.await("leading", 1)
		for i := range 5 {
			leader := standby
			standby = w.member(fmt.Sprintf("m%d", i+1))
			standby.await("standby", 1)
			leader.kill()
			standby.await("leading", 1)
		}
		standby.leave()
		require.Nil(w, w.view().State.Lease)
	})
}

func TestKafkaLeaderNoticesThatTheNetworkHasGone(t *testing.T) {
	onKafka(t, func(w *world) {
		a, b := w.machine(), w.machine()
		l := w.lead(a.elector("a"))
		standby := w.standBy(b.elector("b", coordination.WithClock(coordination.NewManualClock(time.Now().Add(-9*time.Hour)))))
		a.network.cut()
		<-l.Done()
		require.ErrorIs(w, l.Err(), coordination.ErrLeaseExpired)
		require.ErrorIs(w, l.Produce(w.ctx, &kgo.Record{Topic: "any"}), coordination.ErrNotHeld)
		next := standby.won()
		a.network.heal()
		require.NoError(w, next.Check(w.ctx))
		require.NoError(w, next.Resign(w.ctx))
	})
}

func TestKafkaFrozenLastStableOffsetHidesNoLeader(t *testing.T) {
	onKafka(t, func(w *world) {
		partition, err := coordination.RolePartition(w.role, 16)
		require.NoError(w, err)
		a := w.machine()
		l := w.lead(a.elector("a"))
		standby := w.standBy(w.machine().elector("b"))
		other := w.client(kgo.TransactionalID(rand.Text()), kgo.TransactionTimeout(time.Minute), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		require.NoError(w, other.BeginTransaction())
		record := &kgo.Record{Topic: coordination.StateTopic, Partition: partition, Key: []byte("noise")}
		require.NoError(w, other.ProduceSync(w.ctx, record).FirstErr())

		time.Sleep(4 * w.lease.Duration())
		require.NoError(w, l.Check(w.ctx), "the leader renews, although nobody can read that it does")
		require.False(w, standby.over())
		a.network.cut()
		next := standby.won()
		require.NotEqual(w, l.Token(), next.Token())
		require.NoError(w, other.EndTransaction(w.ctx, kgo.TryAbort))
		require.NoError(w, next.Resign(w.ctx))
	})
}

// node drives the script that started the cluster.
func (w *world) node(command string, id int32) {
	w.Helper()
	_, port, err := net.SplitHostPort(w.brokers[0])
	require.NoError(w, err)
	out, err := exec.Command("scripts/kafka", command, "-node", strconv.Itoa(int(id)), "-port", port).CombinedOutput()
	require.NoError(w, err, "%s", out)
}

func TestKafkaLeaderOutlivesItsBrokers(t *testing.T) {
	onKafka(t, func(w *world) {
		if len(w.brokers) < 3 {
			t.Skipf("needs three nodes: %s=$(scripts/kafka up -nodes 3) go test .", brokersEnv)
		}
		lease, err := coordination.LeaseConfigFor(30 * time.Second)
		require.NoError(w, err)
		w.lease = lease
		for name, find := range map[string]func() int32{
			"partition leader": func() int32 {
				partition, err := coordination.RolePartition(w.role, 16)
				require.NoError(w, err)
				topics, err := w.admin().ListTopics(w.ctx, coordination.StateTopic)
				require.NoError(w, err)
				return topics[coordination.StateTopic].Partitions[partition].Leader
			},
			"coordinator": func() int32 {
				status, err := coordination.DescribeLeadership(w.ctx, w.machine().transport, w.role)
				require.NoError(w, err)
				return status.Coordinator
			},
		} {
			t.Run(name, func(t *testing.T) {
				w := *w
				w.T = t
				w.role = coordination.MustRole("role-" + rand.Text())
				w.outlive(find)
			})
		}
	})
}

// outlive kills a broker under a member that writes, and looks whether the member
// goes on.
func (w *world) outlive(find func() int32) {
	topic := w.topic()
	leader := w.member("leader", func(c *memberConfig) { c.Topic, c.Writers = topic, 1 })
	leader.await("acked", 10)
	standby := w.member("standby")
	standby.await("standby", 1)
	victim := find()
	w.node("kill", victim)
	w.Cleanup(func() { w.node("start", victim) })
	acked := len(leader.all("acked"))
	leader.await("acked", acked+50)
	require.Empty(w, standby.all("leading"), "a stall shorter than the lease is no loss")

	terms := leader.all("leading")
	for i, lost := range leader.all("lost") {
		require.Equal(w, "unanswered", lost.Cause, "only an attempt without an answer may end the term: %s", lost.Error)
		require.Greater(w, len(terms), i+1, "and then the same member leads again")
	}
	for i, lost := range leader.all("lost") {
		w.Logf("led again %s after the end of term %s", terms[i+1].At.Sub(lost.At), lost.Token)
	}
	ctx, cancel := context.WithTimeout(w.ctx, awaitPatience)
	defer cancel()
	w.ctx = ctx
	leader.kill()
	standby.kill()
	w.checkLog(topic, leader)
}
