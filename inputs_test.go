package coordination_test

import (
	"context"
	"io"
	"math"
	"net"
	"strings"
	"testing"
	"time"

	coordination "github.com/krabka-io/krabka-coordination-go"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A refusal is something that cannot work, the error it is answered with, and what
// that says to change.
type refusal struct {
	do   func() error
	is   error // or nil, where the codec refuses with a *RecordError
	says string
}

func (r refusal) hold(t testing.TB) {
	t.Helper()
	err := r.do()
	require.Error(t, err)
	if r.is == nil {
		var refused *coordination.RecordError
		require.ErrorAs(t, err, &refused)
	} else {
		require.ErrorIs(t, err, r.is)
	}
	require.ErrorContains(t, err, r.says)
	require.NotContains(t, err.Error(), "%!", "a verb without its argument")
	for _, phrase := range strings.Split(err.Error(), ": ") {
		if len(phrase) > 20 {
			require.Equal(t, 1, strings.Count(err.Error(), phrase), "%q is said twice: %v", phrase, err)
		}
	}
}

// drop leaves the result of a constructor out.
func drop[T any](_ T, err error) error { return err }

// transportWith makes a transport that cannot be made, of a broker that is not asked.
func transportWith(opts ...coordination.BrokerOption) func() error {
	return transportTo([]string{"127.0.0.1:9092"}, opts...)
}

func transportTo(brokers []string, opts ...coordination.BrokerOption) func() error {
	return func() error { return drop(coordination.NewBrokerTransport(context.Background(), brokers, opts...)) }
}

// nowhere is a transport that is never asked anything.
type nowhere struct{ coordination.Transport }

func electorWith(opts ...coordination.ElectorOption) func() error {
	return func() error {
		return drop(coordination.NewElector(nowhere{}, coordination.MustRole("r"), coordination.MustMemberID("m"), opts...))
	}
}

func watchOf(transport coordination.Transport, roles ...coordination.Role) func() error {
	return func() error {
		for _, err := range coordination.Watch(context.Background(), transport, roles...) {
			if err != nil {
				return err
			}
		}
		return nil
	}
}

func TestBadInputIsRefused(t *testing.T) {
	const (
		second = time.Second
		never  = time.Duration(math.MaxInt64)
	)
	var (
		role     = coordination.MustRole("r")
		member   = coordination.MustMemberID("m")
		lease, _ = coordination.LeaseConfigFor(3 * second)
		invalid  = coordination.ErrInvalidConfig
		long     = strings.Repeat("x", 250)
		ctx      = context.Background()
		absent   *coordination.BrokerTransport
	)
	leaseOf := func(duration, renew, stagger time.Duration) func() error {
		return func() error { return drop(coordination.NewLeaseConfig(duration, renew, stagger)) }
	}
	for name, row := range map[string]refusal{
		"role: empty":            {func() error { return drop(coordination.NewRole("")) }, invalid, "use 1 to 249 bytes"},
		"role: long":             {func() error { return drop(coordination.NewRole(long)) }, invalid, "use at most 249"},
		"role: no UTF-8":         {func() error { return drop(coordination.NewRole("\xff")) }, invalid, "UTF-8"},
		"member: empty":          {func() error { return drop(coordination.NewMemberID("")) }, invalid, "use 1 to 249 bytes"},
		"member: long":           {func() error { return drop(coordination.NewMemberID(long)) }, invalid, "use at most 249"},
		"member: no UTF-8":       {func() error { return drop(coordination.NewMemberID("\xff")) }, invalid, "UTF-8"},
		"unique member: long":    {func() error { return drop(coordination.NewUniqueMemberID(long)) }, invalid, "use"},
		"token: negative id":     {func() error { return drop(coordination.NewFencingToken(-1, 0)) }, invalid, "negative"},
		"token: negative epoch":  {func() error { return drop(coordination.NewFencingToken(0, -1)) }, invalid, "negative"},
		"token: text":            {func() error { return drop(coordination.ParseFencingToken("4242")) }, invalid, "4242:7"},
		"token: empty text":      {func() error { return drop(coordination.ParseFencingToken("")) }, invalid, "4242:7"},
		"partition: none":        {func() error { return drop(coordination.RolePartition(role, 0)) }, invalid, "at least 1"},
		"partition: of no role":  {func() error { return drop(coordination.RolePartition(coordination.Role{}, 1)) }, invalid, "NewRole"},
		"key: zero":              {func() error { return drop(coordination.EncodeKey(coordination.Key{})) }, nil, "role"},
		"key: unknown kind":      {func() error { return drop(coordination.EncodeKey(coordination.Key{Kind: 7, Role: role})) }, nil, "kind"},
		"value: nil":             {func() error { return drop(coordination.EncodeValue(nil)) }, nil, "Tombstone"},
		"value: zero lease":      {func() error { return drop(coordination.EncodeValue(coordination.Lease{})) }, nil, "member"},
		"value: lease, no token": {func() error { return drop(coordination.EncodeValue(coordination.Lease{Member: member})) }, nil, "token"},
		"value: zero member":     {func() error { return drop(coordination.EncodeValue(coordination.Registration{})) }, nil, "member"},
		"decode: no key":         {func() error { return drop(coordination.DecodeKey(nil)) }, nil, "key"},
		"decode: no kind":        {func() error { return drop(coordination.DecodeValue(7, []byte{0})) }, nil, "kind"},

		"lease: zero":          {leaseOf(0, 0, 0), invalid, "lease"},
		"lease: negative":      {leaseOf(-second, second, second), invalid, "lease"},
		"lease: renew zero":    {leaseOf(second, 0, 0), invalid, "renew"},
		"lease: renew at end":  {leaseOf(second, second, 0), invalid, "renew"},
		"lease: renew later":   {leaseOf(second, 2*second, 0), invalid, "renew"},
		"lease: stagger below": {leaseOf(second, second/3, -1), invalid, "stagger"},
		"lease: for ever":      {func() error { return drop(coordination.LeaseConfigFor(0)) }, invalid, "lease"},

		"transport: no broker":         {transportTo(nil), invalid, "at least one host:port"},
		"transport: empty broker":      {transportTo([]string{""}), invalid, "use host:port"},
		"transport: broker, no port":   {transportTo([]string{"kafka"}), invalid, "use host:port"},
		"transport: broker, URL":       {transportTo([]string{"kafka://a:9092"}), invalid, "use host:port"},
		"transport: broker, port":      {transportTo([]string{"kafka:x"}), invalid, "use host:port"},
		"transport: broker, high port": {transportTo([]string{"kafka:65536"}), invalid, "use host:port"},
		"transport: brokers in one":    {transportTo([]string{"a:1,b:2"}), invalid, "use host:port"},
		"transport: nil option":        {transportWith(nil), invalid, "option 0 is nil"},
		"transport: topic empty":       {transportWith(coordination.WithTopic("")), invalid, "WithTopic"},
		"transport: topic illegal":     {transportWith(coordination.WithTopic("a b")), invalid, "letters, digits"},
		"transport: topic dots":        {transportWith(coordination.WithTopic("..")), invalid, "WithTopic"},
		"transport: topic long":        {transportWith(coordination.WithTopic(long)), invalid, "249"},
		"transport: partitions":        {transportWith(coordination.WithPartitions(0)), invalid, "WithPartitions(0): use at least 1"},
		"transport: replication":       {transportWith(coordination.WithReplication(-1)), invalid, "WithReplication(-1): use at least 1"},
		"transport: request timeout":   {transportWith(coordination.WithRequestTimeout(0)), invalid, "use at least 100ms"},
		"transport: request for ever":  {transportWith(coordination.WithRequestTimeout(never)), invalid, "use at most"},
		"transport: fetch wait":        {transportWith(coordination.WithFetchMaxWait(0)), invalid, "use between"},
		"transport: fetch wait long":   {transportWith(coordination.WithFetchMaxWait(time.Minute)), invalid, "use between"},
		"transport: fetch size":        {transportWith(coordination.WithFetchPartitionMax(0)), invalid, "use at least"},
		"transport: client id":         {transportWith(coordination.WithClientID("")), invalid, "WithClientID"},
		"transport: no logger":         {transportWith(coordination.WithLogger(nil)), invalid, "WithLogger"},
		"transport: nil kgo option":    {transportWith(coordination.WithClientOptions(nil)), invalid, "WithClientOptions: option 0 is nil"},
		"transport: kgo group":         {transportWith(coordination.WithClientOptions(kgo.ConsumerGroup("g"))), invalid, "leave it out"},
		"transport: kgo topics":        {transportWith(coordination.WithClientOptions(kgo.ConsumeTopics("t"))), invalid, "leave it out"},
		"transport: kgo txn":           {transportWith(coordination.WithClientOptions(kgo.TransactionalID("t"))), invalid, "leave it out"},
		"transport: kgo contradiction": {transportWith(coordination.WithClientOptions(kgo.MaxBufferedRecords(-1))), invalid, "WithClientOptions"},

		"elector: no transport":         {func() error { return drop(coordination.NewElector(nil, role, member)) }, invalid, "NewBrokerTransport"},
		"elector: nil transport":        {func() error { return drop(coordination.NewElector(absent, role, member)) }, invalid, "NewBrokerTransport"},
		"elector: zero transport":       {func() error { return drop(coordination.NewElector(&coordination.BrokerTransport{}, role, member)) }, invalid, "NewBrokerTransport"},
		"elector: zero role":            {func() error { return drop(coordination.NewElector(nowhere{}, coordination.Role{}, member)) }, invalid, "NewRole"},
		"elector: zero member":          {func() error { return drop(coordination.NewElector(nowhere{}, role, coordination.MemberID{})) }, invalid, "NewMemberID"},
		"elector: nil option":           {electorWith(nil), invalid, "option 0 is nil"},
		"elector: zero lease":           {electorWith(coordination.WithLease(coordination.LeaseConfig{})), invalid, "LeaseConfigFor"},
		"elector: stop margin below":    {electorWith(coordination.WithStopMargin(-1)), invalid, "WithStopMargin"},
		"elector: stop margin above":    {electorWith(coordination.WithLease(lease), coordination.WithStopMargin(2*second)), invalid, "use less than 2s"},
		"elector: drain below":          {electorWith(coordination.WithDrainTimeout(-1)), invalid, "WithDrainTimeout"},
		"elector: transaction timeout":  {electorWith(coordination.WithTransactionTimeout(-1)), invalid, "WithTransactionTimeout"},
		"elector: transaction for ever": {electorWith(coordination.WithTransactionTimeout(never)), invalid, "use at most"},
		"elector: buffer":               {electorWith(coordination.WithMaxBuffered(0)), invalid, "WithMaxBuffered"},
		"elector: extent":               {electorWith(coordination.WithMaxExtent(0)), invalid, "WithMaxExtent"},
		"elector: no clock":             {electorWith(coordination.WithClock(nil)), invalid, "WithClock"},
		"elector: no logger":            {electorWith(coordination.WithLogger(nil)), invalid, "WithLogger"},
		"elector: nil kgo option":       {electorWith(coordination.WithProducerOptions(nil)), invalid, "WithProducerOptions: option 0 is nil"},
		"elector: kgo retries":          {electorWith(coordination.WithProducerOptions(kgo.RecordRetries(1))), invalid, "leave it out"},
		"elector: kgo versions":         {electorWith(coordination.WithProducerOptions(kgo.MaxVersions(nil))), invalid, "leave it out"},
		"elector: no function": {func() error {
			e, err := coordination.NewElector(nowhere{}, role, member)
			if err != nil {
				return err
			}
			return e.Run(ctx, nil)
		}, invalid, "function"},

		"zero elector: Campaign": {func() error { return drop(new(coordination.Elector).Campaign(ctx)) }, invalid, "NewElector"},
		"zero elector: Run": {func() error {
			return new(coordination.Elector).Run(ctx, func(context.Context, *coordination.Leadership) error { return nil })
		}, invalid, "NewElector"},
		"zero leadership: Produce": {func() error { return new(coordination.Leadership).Produce(ctx, &kgo.Record{}) }, coordination.ErrNotHeld, "Campaign"},
		"zero leadership: Err":     {func() error { return new(coordination.Leadership).Err() }, coordination.ErrNotHeld, "Campaign"},
		"zero leadership: Check":   {func() error { return new(coordination.Leadership).Check(ctx) }, coordination.ErrNotHeld, "Campaign"},
		"zero leadership: Transact": {func() error {
			return new(coordination.Leadership).Transact(ctx, func(context.Context, *coordination.Tx) error { return nil })
		}, coordination.ErrNotHeld, "Campaign"},
		"zero leadership: offsets":  {func() error { return drop(new(coordination.Leadership).CommittedOffsets(ctx, "g")) }, coordination.ErrNotHeld, "Campaign"},
		"zero transaction: Produce": {func() error { return new(coordination.Tx).Produce(&kgo.Record{}) }, invalid, "Transact"},
		"zero transaction: offsets": {func() error { return new(coordination.Tx).CommitOffsets("g", nil) }, invalid, "Transact"},
		"zero unknown: Resolve":     {func() error { return drop(new(coordination.OutcomeUnknownError).Resolve(ctx)) }, invalid, "NewOutcomeUnknownError"},
		"zero transport: Read":      {func() error { return drop(new(coordination.BrokerTransport).Read(ctx, role)) }, coordination.ErrClosed, "NewBrokerTransport"},
		"zero transport: Describe":  {func() error { return drop(new(coordination.BrokerTransport).Describe(ctx, role)) }, coordination.ErrClosed, "NewBrokerTransport"},
		"zero transport: Roles":     {func() error { return drop(new(coordination.BrokerTransport).Roles(ctx)) }, coordination.ErrClosed, "NewBrokerTransport"},

		"watch: no transport":      {watchOf(nil), invalid, "NewBrokerTransport"},
		"watch: nil transport":     {watchOf(absent), invalid, "NewBrokerTransport"},
		"watch: zero role":         {watchOf(nowhere{}, coordination.Role{}), invalid, "NewRole"},
		"describe: no transport":   {func() error { return drop(coordination.DescribeLeadership(ctx, nil, role)) }, invalid, "NewBrokerTransport"},
		"describe: nil transport":  {func() error { return drop(coordination.DescribeLeadership(ctx, absent, role)) }, invalid, "NewBrokerTransport"},
		"describe: zero role":      {func() error { return drop(coordination.DescribeLeadership(ctx, nowhere{}, coordination.Role{})) }, invalid, "NewRole"},
		"record token: no records": {func() error { var t coordination.FencingToken; return t.UnmarshalText([]byte(":")) }, invalid, "4242:7"},
	} {
		t.Run(name, func(t *testing.T) { row.hold(t) })
	}
}

// What has a zero value can be looked at.
func TestZeroValuesAreHarmless(t *testing.T) {
	var (
		elector    coordination.Elector
		leadership coordination.Leadership
		transport  coordination.BrokerTransport
		gate       coordination.Gate
		builder    coordination.RoleStateBuilder
		clock      coordination.ManualClock
	)
	require.Equal(t, coordination.PhaseStopped, elector.Status().Phase)
	<-leadership.Done()
	require.Error(t, leadership.Context().Err())
	require.Zero(t, leadership.Token())
	require.Zero(t, leadership.Role())
	require.Zero(t, leadership.Member())
	require.True(t, leadership.Deadline().Before(time.Now()))
	require.NoError(t, leadership.Resign(t.Context()))
	called := false
	leadership.ProduceAsync(t.Context(), func(_ []*kgo.Record, err error) {
		called = true
		require.ErrorIs(t, err, coordination.ErrNotHeld)
	})
	require.True(t, called)
	transport.Close()
	require.NoError(t, transport.Shutdown(t.Context()))
	require.True(t, gate.Admit(0))
	builder.Apply(0, coordination.LeaseKey(coordination.MustRole("r")), coordination.Tombstone{})
	require.Empty(t, builder.State().Roster)
	require.Zero(t, clock.Now())
	require.False(t, coordination.LeadershipStatus{}.Authoritative(coordination.FencingToken{}))
	require.Equal(t, coordination.ActionNotRegistered,
		coordination.Evaluate(coordination.RoleState{}, coordination.MemberID{}, time.Time{}, coordination.LeaseConfig{}).Action)
	for _, err := range []error{&coordination.RejectedError{}, &coordination.OutcomeUnknownError{}, &coordination.RecordError{}} {
		require.NotEmpty(t, err.Error())
	}
}

// serve answers every connection with a function, on a port of its own.
func serve(t testing.TB, answer func(net.Conn)) (address string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				answer(conn)
			}()
		}
	}()
	return listener.Addr().String()
}

// What listens on a port may be anything.
func TestWhatIsNoKafkaIsRefusedInTime(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nobody := free.Addr().String()
	require.NoError(t, free.Close())
	for name, address := range map[string]string{
		"nobody listens": nobody,
		"no such host":   "nowhere.invalid:9092",
		"a web server": serve(t, func(conn net.Conn) {
			_, _ = io.WriteString(conn, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
		}),
		"hangs up":  serve(t, func(net.Conn) {}),
		"is silent": serve(t, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) }),
		"an echo":   serve(t, func(conn net.Conn) { _, _ = io.Copy(conn, conn) }),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			err := transportTo([]string{address})()
			require.ErrorContains(t, err, address)
			require.NotErrorIs(t, err, coordination.ErrInvalidConfig)
			require.Less(t, time.Since(began), 5*time.Second)

			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			_, err = coordination.NewBrokerTransport(ctx, []string{address})
			require.Error(t, err)
			require.Less(t, time.Since(began), 5*time.Second+500*time.Millisecond)
		})
	}
}
