package coordination_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// The tests in this file hold clusters against the library that are not as they
// should be: they are set up badly, or change, or do not let it do something.

// answerBound is how long what cannot work may take to be answered.
const answerBound = 5 * time.Second

// inTime holds a refusal, which has to come soon.
func (w *world) inTime(is error, says string, do func() error) {
	w.Helper()
	began := time.Now()
	refusal{do, is, says}.hold(w)
	require.Less(w, time.Since(began), answerBound)
}

// campaign ends by itself, or after the bound.
func (m *machine) campaign(opts ...coordination.ElectorOption) error {
	ctx, cancel := context.WithTimeout(m.w.ctx, 2*answerBound)
	defer cancel()
	l, err := m.elector("m-"+rand.Text(), opts...).Campaign(ctx)
	if err == nil {
		err = l.Resign(m.w.ctx)
	}
	return err
}

// own gives a world a state topic of its own, which does not exist yet.
func (w *world) own() coordination.BrokerOption {
	return coordination.WithTopic("state-" + rand.Text())
}

func TestClusterThatRefuses(t *testing.T) {
	refuse := func(kind kmsg.Key, code *kerr.Error) func(w *world) {
		return func(w *world) {
			w.cluster.Fake().ControlKey(int16(kind), func(request kmsg.Request) (kmsg.Response, error, bool) {
				w.cluster.Fake().KeepControl()
				refused := refusalOf(request, code)
				return refused, nil, refused != nil
			})
		}
	}
	topic := func(config map[string]string) func(w *world) {
		return func(w *world) {
			configs := make(map[string]*string)
			for k, v := range config {
				configs[k] = &v
			}
			_, err := w.admin().CreateTopic(w.ctx, 16, 3, configs, coordination.StateTopic)
			require.NoError(w, err)
		}
	}
	for name, row := range map[string]struct {
		cluster func(w *world)
		options []coordination.BrokerOption
		says    string
	}{
		"too few brokers":       {options: []coordination.BrokerOption{coordination.WithReplication(4)}, says: "use WithReplication"},
		"topics are not made":   {options: []coordination.BrokerOption{coordination.WithTopicCreation(false)}, says: "create it"},
		"policy forbids topics": {refuse(kmsg.CreateTopics, kerr.PolicyViolation), nil, "create it by hand and use WithTopicCreation(false)"},
		"topic not authorized":  {refuse(kmsg.CreateTopics, kerr.TopicAuthorizationFailed), nil, "grant Create"},
		"cleanup is delete":     {topic(map[string]string{"cleanup.policy": "delete"}), nil, "set it to compact"},
		"cleanup is both":       {topic(map[string]string{"cleanup.policy": "compact,delete"}), nil, "set it to compact"},
		"mint not authorized":   {refuse(kmsg.InitProducerID, kerr.TransactionalIDAuthorizationFailed), nil, "grant Write"},
		"transaction too long":  {refuse(kmsg.InitProducerID, kerr.InvalidTransactionTimeout), nil, "transaction.max.timeout.ms"},
	} {
		t.Run(name, func(t *testing.T) {
			inVirtualTime(t, func(w *world) {
				if row.cluster != nil {
					row.cluster(w)
				}
				m := w.machine(row.options...)
				w.inTime(coordination.ErrInvalidConfig, row.says, func() error { return m.campaign() })
				w.inTime(coordination.ErrInvalidConfig, row.says, func() error {
					return m.elector("runner").Run(w.ctx, func(context.Context, *coordination.Leadership) error { return nil })
				})
			})
		})
	}
}

// refusalOf is the answer of a broker that refuses a request.
func refusalOf(request kmsg.Request, code *kerr.Error) kmsg.Response {
	switch r := request.(type) {
	case *kmsg.CreateTopicsRequest:
		answer := r.ResponseKind().(*kmsg.CreateTopicsResponse)
		for _, topic := range r.Topics {
			refused := kmsg.NewCreateTopicsResponseTopic()
			refused.Topic, refused.ErrorCode = topic.Topic, code.Code
			answer.Topics = append(answer.Topics, refused)
		}
		return answer
	case *kmsg.InitProducerIDRequest:
		if r.TransactionalID == nil {
			return nil // a registration's
		}
		answer := r.ResponseKind().(*kmsg.InitProducerIDResponse)
		answer.ErrorCode = code.Code
		return answer
	}
	return nil
}

func TestWhatIsClosedOrCancelledAnswersAtOnce(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		errWhy := errors.New("the caller has gone")
		gone, cancel := context.WithCancelCause(w.ctx)
		cancel(errWhy)
		m := w.machine()
		l := w.lead(m.elector("leader"))
		entry := w.ledger()
		function := func(context.Context, *coordination.Tx) error { return nil }
		verbs := func(ctx context.Context) map[string]func() error {
			return map[string]func() error{
				"Campaign":           func() error { return drop(m.elector("other").Campaign(ctx)) },
				"Produce":            func() error { return l.Produce(ctx, entry("x")) },
				"Transact":           func() error { return l.Transact(ctx, function) },
				"Check":              func() error { return l.Check(ctx) },
				"CommittedOffsets":   func() error { return drop(l.CommittedOffsets(ctx, "group")) },
				"DescribeLeadership": func() error { return drop(coordination.DescribeLeadership(ctx, m.transport, w.role)) },
				"Watch": func() error {
					for _, err := range coordination.Watch(ctx, m.transport, w.role) {
						if err != nil {
							return err
						}
					}
					return nil
				},
			}
		}
		for verb, do := range verbs(gone) {
			began := time.Now()
			require.ErrorIs(w, do(), errWhy, verb)
			require.Less(w, time.Since(began), 50*time.Millisecond, verb)
		}
		require.NoError(w, m.elector("runner").Run(gone, func(context.Context, *coordination.Leadership) error { return nil }))
		require.NoError(w, l.Err(), "what callers do with their contexts costs no leadership")
		second := m.elector("second")
		standby := w.standBy(second)
		require.ErrorIs(w, drop(second.Campaign(w.ctx)), coordination.ErrElectorBusy)

		m.transport.Close()
		for verb, do := range verbs(w.ctx) {
			began := time.Now()
			require.ErrorIs(w, do(), coordination.ErrClosed, verb)
			require.Less(w, time.Since(began), 50*time.Millisecond, verb)
		}
		<-standby.done
		require.ErrorIs(w, standby.err, coordination.ErrClosed)
	})
}

// A cluster that goes away after the constructor is waited for, in sight of whoever
// looks.
func TestUnreachableClusterIsWaitedFor(t *testing.T) {
	inVirtualTime(t, func(w *world) {
		m := w.machine()
		m.network.cut()
		e := m.elector("a")
		campaign := make(chan *coordination.Leadership)
		go func() {
			l, _ := e.Campaign(w.ctx)
			campaign <- l
		}()
		w.await("the fault shows", func() bool { return e.Status().LastError != nil })
		status := e.Status()
		require.Equal(w, coordination.PhaseJoining, status.Phase)
		require.ErrorContains(w, status.LastError, "follow the role")
		m.network.heal()
		l := <-campaign
		require.NotNil(w, l)
		require.NoError(w, e.Status().LastError)
		require.NoError(w, l.Resign(w.ctx))
	})
}

// secure returns the addresses of another listener of the nodes of scripts/kafka.
func (w *world) secure(offset int) []string {
	w.Helper()
	var addresses []string
	for _, broker := range w.brokers {
		host, port, err := net.SplitHostPort(broker)
		require.NoError(w, err)
		number, err := strconv.Atoi(port)
		require.NoError(w, err)
		addresses = append(addresses, net.JoinHostPort(host, strconv.Itoa(number+offset)))
	}
	return addresses
}

const (
	saslListener = 20
	tlsListener  = 30
)

// user makes a user who may do what its ACLs say.
func (w *world) user(acls ...*kadm.ACLBuilder) kgo.Opt {
	w.Helper()
	name, password := "user-"+rand.Text(), rand.Text()
	for _, acl := range acls {
		created, err := w.admin().CreateACLs(w.ctx, acl.Allow("User:"+name).AllowHosts("*").ResourcePatternType(kadm.ACLPatternLiteral))
		require.NoError(w, err)
		for _, c := range created {
			require.NoError(w, c.Err)
		}
	}
	altered, err := w.admin().AlterUserSCRAMs(w.ctx, nil, []kadm.UpsertSCRAM{
		{User: name, Mechanism: kadm.ScramSha256, Iterations: 4096, Password: password},
	})
	require.NoError(w, err)
	require.NoError(w, altered[name].Err)
	login := kgo.SASL(scram.Auth{User: name, Pass: password}.AsSha256Mechanism())
	for _, broker := range w.secure(saslListener) {
		client, err := kgo.NewClient(kgo.SeedBrokers(broker), login, kgo.DisableClientMetrics())
		require.NoError(w, err)
		w.await("the user is known", func() bool { return client.Ping(w.ctx) == nil })
		client.Close()
	}
	return login
}

// as makes a machine whose transport logs in.
func (w *world) as(login kgo.Opt, opts ...coordination.BrokerOption) *machine {
	w.Helper()
	secured := *w
	secured.brokers = w.secure(saslListener)
	return secured.machine(append([]coordination.BrokerOption{coordination.WithClientOptions(login)}, opts...)...)
}

func allow(acl *kadm.ACLBuilder, operations ...kadm.ACLOperation) *kadm.ACLBuilder {
	return acl.Operations(operations...)
}

func TestKafkaRefusesWhoIsNotLetIn(t *testing.T) {
	onKafka(t, func(w *world) {
		var (
			invalid  = coordination.ErrInvalidConfig
			wrong    = scram.Auth{User: "nobody", Pass: "wrong password"}
			trusting = &tls.Config{InsecureSkipVerify: true}
		)
		for name, row := range map[string]struct {
			listener int
			option   kgo.Opt
			is       error
			says     string
		}{
			"wrong password":        {saslListener, kgo.SASL(wrong.AsSha256Mechanism()), invalid, "check the user and the password"},
			"other mechanism":       {saslListener, kgo.SASL(plain.Auth{User: "u", Pass: "p"}.AsMechanism()), invalid, "use a SASL mechanism that the listener offers"},
			"no login":              {saslListener, nil, nil, "SASL"},
			"login to plaintext":    {0, kgo.SASL(wrong.AsSha256Mechanism()), nil, "SASL"},
			"TLS to plaintext":      {0, kgo.DialTLSConfig(trusting), nil, "TLS"},
			"plaintext to TLS":      {tlsListener, nil, nil, "TLS"},
			"unknown authority":     {tlsListener, kgo.DialTLSConfig(&tls.Config{}), invalid, "certificate"},
			"another server's name": {tlsListener, kgo.DialTLSConfig(&tls.Config{ServerName: "elsewhere", RootCAs: w.authority()}), invalid, "certificate"},
		} {
			t.Run(name, func(t *testing.T) {
				var opts []coordination.BrokerOption
				if row.option != nil {
					opts = append(opts, coordination.WithClientOptions(row.option))
				}
				began := time.Now()
				err := transportTo(w.secure(row.listener), opts...)()
				require.Less(t, time.Since(began), answerBound)
				t.Log(err)
				if row.is != nil {
					require.ErrorIs(t, err, row.is)
				}
				require.ErrorContains(t, err, row.says)
				require.NotContains(t, err.Error(), wrong.Pass)
			})
		}
		for name, open := range map[string]func() (*coordination.BrokerTransport, error){
			"TLS": func() (*coordination.BrokerTransport, error) {
				return coordination.NewBrokerTransport(w.ctx, w.secure(tlsListener),
					coordination.WithClientOptions(kgo.DialTLSConfig(&tls.Config{RootCAs: w.authority()})))
			},
			"SASL": func() (*coordination.BrokerTransport, error) {
				return coordination.NewBrokerTransport(w.ctx, w.secure(saslListener), coordination.WithClientOptions(w.user()))
			},
		} {
			transport, err := open()
			require.NoError(t, err, name)
			transport.Close()
		}
	})
}

// authority trusts the brokers' certificates.
func (w *world) authority() *x509.CertPool {
	w.Helper()
	_, port, err := net.SplitHostPort(w.brokers[0])
	require.NoError(w, err)
	file, err := exec.Command("scripts/kafka", "certificate", "-port", port).Output()
	require.NoError(w, err)
	certificate, err := os.ReadFile(strings.TrimSpace(string(file)))
	require.NoError(w, err)
	pool := x509.NewCertPool()
	require.True(w, pool.AppendCertsFromPEM(certificate))
	return pool
}

func TestKafkaMissingACLsAreNamed(t *testing.T) {
	onKafka(t, func(w *world) {
		w.lead(w.machine().elector("before")).Resign(w.ctx) // the state topic is there
		var (
			invalid = coordination.ErrInvalidConfig
			ledger  = w.topic()
			group   = "group-" + rand.Text()
			role    = w.role.String()

			read    = func() *kadm.ACLBuilder { return allow(kadm.NewACLs().Topics(coordination.StateTopic), kadm.OpRead) }
			write   = func() *kadm.ACLBuilder { return allow(kadm.NewACLs().Topics(coordination.StateTopic), kadm.OpWrite) }
			configs = func() *kadm.ACLBuilder {
				return allow(kadm.NewACLs().Topics(coordination.StateTopic), kadm.OpDescribeConfigs)
			}
			mint     = func() *kadm.ACLBuilder { return allow(kadm.NewACLs().TransactionalIDs(role), kadm.OpWrite) }
			describe = func() *kadm.ACLBuilder { return allow(kadm.NewACLs().TransactionalIDs(role), kadm.OpDescribe) }
			guarded  = func() *kadm.ACLBuilder { return allow(kadm.NewACLs().Topics(ledger), kadm.OpWrite) }
			consume  = func() *kadm.ACLBuilder { return allow(kadm.NewACLs().Groups(group), kadm.OpRead) }
			source   = func() *kadm.ACLBuilder { return allow(kadm.NewACLs().Topics(ledger), kadm.OpRead) }
		)
		for name, row := range map[string]struct {
			acls []*kadm.ACLBuilder
			says string
		}{
			"nothing":            {nil, "grant Read and Write (a member)"},
			"no Read":            {[]*kadm.ACLBuilder{write(), configs(), mint()}, "grant Read and Write (a member)"},
			"no Write":           {[]*kadm.ACLBuilder{read(), configs(), mint()}, "grant Write on the topic"},
			"no mint":            {[]*kadm.ACLBuilder{read(), write(), configs()}, "grant Write (a member)"},
			"describes the role": {[]*kadm.ACLBuilder{read(), write(), configs(), describe()}, "grant Write (a member)"},
		} {
			t.Run(name, func(t *testing.T) {
				w := *w
				w.T = t
				m := w.as(w.user(row.acls...))
				w.inTime(invalid, row.says, func() error { return m.campaign() })
			})
		}

		t.Run("no Create", func(t *testing.T) {
			w := *w
			w.T = t
			topic := "state-" + rand.Text()
			m := w.as(w.user(allow(kadm.NewACLs().Topics(topic), kadm.OpRead, kadm.OpWrite), mint()), coordination.WithTopic(topic))
			w.inTime(invalid, "grant Create on the topic, or create it by hand", func() error { return m.campaign() })
		})

		t.Run("no DescribeConfigs", func(t *testing.T) {
			w := *w
			w.T = t
			var log bytes.Buffer
			m := w.as(w.user(read(), write(), mint()), coordination.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
			l := w.lead(m.elector("a"))
			require.NoError(t, l.Resign(w.ctx))
			require.Equal(t, 1, strings.Count(log.String(), "grant DescribeConfigs"), log.String())
		})

		t.Run("no Write on a guarded topic", func(t *testing.T) {
			w := *w
			w.T = t
			l := w.lead(w.as(w.user(read(), write(), mint())).elector("a"))
			w.inTime(invalid, "grant Write on topic", func() error { return l.Produce(w.ctx, &kgo.Record{Topic: ledger, Value: []byte("x")}) })
			require.NoError(t, l.Check(w.ctx), "it costs the call alone")
			require.NoError(t, l.Resign(w.ctx))
		})

		t.Run("no Read on a group", func(t *testing.T) {
			w := *w
			w.T = t
			l := w.lead(w.as(w.user(read(), write(), mint(), guarded(), source())).elector("a"))
			commit := func(_ context.Context, tx *coordination.Tx) error {
				offsets := kadm.Offsets{}
				offsets.Add(kadm.Offset{Topic: ledger, At: 1, LeaderEpoch: -1})
				return tx.CommitOffsets(group, offsets)
			}
			w.inTime(invalid, "grant Read on the consumer group", func() error { return l.Transact(w.ctx, commit) })
			w.inTime(invalid, "grant Read on the consumer group", func() error { return drop(l.CommittedOffsets(w.ctx, group)) })
			require.NoError(t, l.Check(w.ctx), "it costs the call alone")
			require.NoError(t, l.Resign(w.ctx))

			l = w.lead(w.as(w.user(read(), write(), mint(), guarded(), source(), consume())).elector("b"))
			require.NoError(t, l.Transact(w.ctx, commit))
			offsets, err := l.CommittedOffsets(w.ctx, group)
			require.NoError(t, err)
			found, _ := offsets.Lookup(ledger, 0)
			require.EqualValues(t, 1, found.At)
			require.NoError(t, l.Resign(w.ctx))
		})

		t.Run("auditor", func(t *testing.T) {
			w := *w
			w.T = t
			status, err := coordination.DescribeLeadership(w.ctx, w.as(w.user(describe())).transport, w.role)
			require.NoError(t, err)
			_, ok := status.Token()
			require.True(t, ok)
			w.inTime(invalid, "Describe (an auditor)", func() error {
				return drop(coordination.DescribeLeadership(w.ctx, w.as(w.user()).transport, w.role))
			})
		})

		t.Run("observer", func(t *testing.T) {
			w := *w
			w.T = t
			for view, err := range coordination.Watch(w.ctx, w.as(w.user(read(), describe())).transport, w.role) {
				require.NoError(t, err)
				require.Equal(t, w.role, view.Role)
				break
			}
			w.inTime(invalid, "Read (an observer) on the topic", func() error { return watchOf(w.as(w.user(describe())).transport, w.role)() })
			w.inTime(invalid, "Read (an observer) on the topic", func() error { return watchOf(w.as(w.user(describe())).transport)() })
		})
	})
}

func TestKafkaFirstOffsetsAreReadBack(t *testing.T) {
	onKafka(t, func(w *world) {
		topic := w.topic()
		l := w.lead(w.machine().elector("a"))
		for range 50 {
			group := "group-" + rand.Text()
			require.NoError(w, l.Transact(w.ctx, func(_ context.Context, tx *coordination.Tx) error {
				offsets := make(kadm.Offsets)
				offsets.AddOffset(topic, 0, 7, -1)
				return tx.CommitOffsets(group, offsets)
			}))
			committed, err := l.CommittedOffsets(w.ctx, group)
			require.NoError(w, err)
			found, ok := committed.Lookup(topic, 0)
			require.True(w, ok)
			require.EqualValues(w, 7, found.At)
		}
		require.NoError(w, l.Resign(w.ctx))
	})
}

func TestKafkaClusterThatRefuses(t *testing.T) {
	onKafka(t, func(w *world) {
		invalid := coordination.ErrInvalidConfig
		create := func(name string, config map[string]string) {
			configs := make(map[string]*string)
			for k, v := range config {
				configs[k] = &v
			}
			_, err := w.admin().CreateTopic(w.ctx, 16, w.replication, configs, name)
			require.NoError(w, err)
			w.await("the topic is known", func() bool {
				topics, err := w.admin().ListTopics(w.ctx, name)
				return err == nil && topics[name].Err == nil
			})
		}
		w.inTime(invalid, "use WithReplication", func() error { return w.machine(w.own(), coordination.WithReplication(7)).campaign() })
		w.inTime(invalid, "create it", func() error { return w.machine(w.own(), coordination.WithTopicCreation(false)).campaign() })
		w.inTime(invalid, "transaction.max.timeout.ms", func() error {
			return w.machine().campaign(coordination.WithTransactionTimeout(20 * time.Minute))
		})
		for _, policy := range []string{"delete", "compact,delete"} {
			name := "state-" + rand.Text()
			create(name, map[string]string{"cleanup.policy": policy})
			w.inTime(invalid, "set it to compact", func() error { return w.machine(coordination.WithTopic(name)).campaign() })
		}

		name := "state-" + rand.Text()
		create(name, map[string]string{"cleanup.policy": "compact", "message.timestamp.type": "CreateTime"})
		var log bytes.Buffer
		m := w.machine(coordination.WithTopic(name), coordination.WithLogger(slog.New(slog.NewTextHandler(&log, nil))))
		for range 2 {
			require.NoError(w, m.campaign())
		}
		require.Equal(w, 1, strings.Count(log.String(), "set it to LogAppendTime"), log.String())
	})
}

func TestKafkaTopicThatChangesEndsLeadershipAndCampaign(t *testing.T) {
	onKafka(t, func(w *world) {
		for name, change := range map[string]func(topic string){
			"partitions are added": func(topic string) {
				added, err := w.admin().CreatePartitions(w.ctx, 1, topic)
				require.NoError(w, err)
				require.NoError(w, added.Error())
			},
			"deleted": func(topic string) {
				_, err := w.admin().DeleteTopic(w.ctx, topic)
				require.NoError(w, err)
			},
			"created again": func(topic string) {
				_, err := w.admin().DeleteTopic(w.ctx, topic)
				require.NoError(w, err)
				w.await("it is created again", func() bool {
					_, err := w.admin().CreateTopic(w.ctx, 16, w.replication, map[string]*string{"cleanup.policy": kadm.StringPtr("compact")}, topic)
					return err == nil
				})
			},
		} {
			t.Run(name, func(t *testing.T) {
				w := *w
				w.T = t
				topic := "state-" + rand.Text()
				lease, err := coordination.LeaseConfigFor(3 * time.Second)
				require.NoError(t, err)
				w.lease = lease
				l := w.lead(w.machine(coordination.WithTopic(topic)).elector("leader"))
				standby := w.standBy(w.machine(coordination.WithTopic(topic)).elector("standby"))
				change(topic)
				w.inTime(coordination.ErrTopicChanged, "restart", func() error {
					<-l.Done()
					return l.Err()
				})
				w.inTime(coordination.ErrTopicChanged, "restart", func() error {
					<-standby.done
					return standby.err
				})
			})
		}
	})
}
